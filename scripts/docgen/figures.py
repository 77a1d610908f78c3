"""Tables of what was measured, from the JSON that the demo and the bench write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.docgen.conditions import conditions, not_measured
from scripts.docgen.tables import number_table

DEMO_RESULT = Path("bench/results/demo.json")
BENCH_RESULT = Path("bench/results/ttft.json")
PROXY_RESULT = Path("bench/results/proxy.json")
DEMO_COMMAND = f'make demo ARGS="--json {DEMO_RESULT}"'
BENCH_COMMAND = f'make bench ARGS="--control --out {BENCH_RESULT}"'
PROXY_COMMAND = f"python -m bench.proxy --out {PROXY_RESULT}"

Figures = Mapping[str, Any]
DEMO_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("time to first token", lambda mode: _ms(mode["ttft_ms"])),
    ("prefill", lambda mode: _ms(mode["prefill_ms"])),
    ("transfer", lambda mode: _ms(mode["transfer_ms"])),
    ("**exposed**", lambda mode: f"**{_ms(mode['exposed_ms'], 1)}**"),
    ("layers hooked / swept", lambda mode: f"{_count(mode['hooked_layers'])} / {_count(mode['swept_layers'])}"),
    ("WRITEs", lambda mode: _count(mode["writes"])),
    ("descriptors", lambda mode: _count(mode["descriptors"])),
    ("bytes", lambda mode: _mib(mode["bytes"])),
    ("tokens equal", lambda mode: "yes" if mode["tokens_equal"] else "**no**"),
)


def demo(root: Path) -> str:
    """The table of ``bench/results/demo.json``, or that there is none."""
    path = root / DEMO_RESULT
    return demo_table(json.loads(path.read_text())) if path.exists() else not_measured(DEMO_COMMAND)


def bench(root: Path) -> str:
    """The table of ``bench/results/ttft.json``, or that there is none."""
    path = root / BENCH_RESULT
    return bench_table(json.loads(path.read_text())) if path.exists() else not_measured(BENCH_COMMAND)


def proxy(root: Path) -> str:
    """The table of ``bench/results/proxy.json``, or that there is none."""
    path = root / PROXY_RESULT
    return proxy_table(json.loads(path.read_text())) if path.exists() else not_measured(PROXY_COMMAND)


def demo_table(result: Mapping[str, Any]) -> str:
    """One column per mode; below it what the run says and under which conditions."""
    modes: Mapping[str, Figures] = result["modes"]
    rows = [(heading, *(show(mode) for mode in modes.values())) for heading, show in DEMO_ROWS]
    table = number_table(("", *(f"`{name}`" for name in modes)), rows)
    return f"{table}\n\n{' '.join([*_demo_remarks(result), conditions(result)])}"


def bench_table(result: Mapping[str, Any]) -> str:
    """One row per prompt length; below it what the columns are and under which conditions."""
    cells = result["cells"]
    modes, ratios = list(cells[0]["modes"]), list(cells[0]["ttft_ratios"])
    headings = ("tokens", *(f"`{mode}`" for mode in modes), *(f"`{name}`" for name in ratios))
    rows = []
    for cell in cells:
        medians = [_ms(cell["modes"][mode]["ttft_ms"]["median"], 1) for mode in modes]
        rows.append((str(cell["prompt_tokens"]), *medians, *(_ratio(cell["ttft_ratios"][name]) for name in ratios)))
    rounds = sorted({cell["rounds"] for cell in cells})
    about = (
        f"Time to first token, median of {_range(rounds)} rounds, and ratios of medians with their 95 % interval; "
        "below 1 the first of the two is faster."
    )
    if "request-again" in modes:
        about += " `request-again` is a second engine in `request` mode: how far its ratio is from 1 is noise."
    return f"{number_table(headings, rows)}\n\n{about} {conditions(result)}"


def proxy_table(result: Mapping[str, Any]) -> str:
    """One row per prompt length and number of streams; below it what the columns are and under which conditions."""
    rows = [
        (
            str(cell["prompt_tokens"]),
            str(cell["streams"]),
            *(_ms(cell["first_ms"][way]["median"], 1) for way in ("direct", "proxied")),
            *(_added(cell[part]["added"]) for part in ("first_ms", "whole_ms")),
            _ratio(cell["first_ms"]["ratio"]),
            _ms((cell["round_ms"]["proxied"]["median"] - cell["round_ms"]["direct"]["median"]) / cell["streams"], 1),
        )
        for cell in result["cells"]
    ]
    headings = (
        "tokens",
        "at a time",
        "straight",
        "proxied",
        "added",
        "added to the last byte",
        "proxied/straight",
        "per request",
    )
    requests = _range(sorted({cell["requests"] for cell in result["cells"]}))
    about = (
        f"Time to the first byte, median of {requests} streams of {result['answer_events']} events from an engine that "
        "answers at once, straight and through the proxy in turn, with 95 % intervals. Client, proxy, P and D share "
        "the machine: with many at a time the streams wait for its cores, and what matters is the last column, by how "
        "much a round of so many takes longer, divided by their number."
    )
    return f"{number_table(headings, rows)}\n\n{about} {conditions(result)}"


def _demo_remarks(result: Mapping[str, Any]) -> list[str]:
    remarks = []
    layer, request = (result["modes"][mode]["exposed_ms"] for mode in ("layer", "request"))
    if layer is not None and request:
        remarks.append(f"After prefill, `layer` leaves {100 * layer / request:.0f} % of what `request` leaves exposed.")
    samples = result.get("samples", {}).get("layer", [])
    lengths = sorted({sample["push"]["tokens"] for sample in samples if sample["push"]})
    if lengths:
        remarks.append(f"Medians of {len(samples)} prompts of {_range(lengths)} tokens.")
    if result["negative_control_detected"]:
        remarks.append("Negative control: with one layer corrupted, the tokens changed.")
    else:
        remarks.append(
            "**Negative control: with one layer corrupted, the tokens did not change; equal tokens say nothing.**"
        )
    return remarks


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _ratio(one: Mapping[str, float]) -> str:
    return f"{one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def _added(one: Mapping[str, float]) -> str:
    return f"{one['difference']:.1f} ms [{one['low']:.1f}, {one['high']:.1f}]"


def _ms(value: float | None, digits: int = 0) -> str:
    return "?" if value is None else f"{value:.{digits}f} ms"


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


def _mib(value: int | None) -> str:
    return "?" if value is None else f"{value / 2**20:.0f} MiB"
