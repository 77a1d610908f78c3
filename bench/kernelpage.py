"""Tables of the documentation, from the JSON of ``python -m bench.kernel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.markdown import Result, conditions, number_table

SIZES = tuple(kib << 10 for kib in (4, 16, 64, 256))
COUNTS = (64, 1024, 8192)
IDS = "random"
OURS = "layerpush"
ROUNDED = 1000
"""From this rate on, in GB/s, a table shows no fraction."""
DIRECTIONS = {"gather": "index_select", "scatter": "index_copy_"}
"""Each direction with torch's operator for it."""

Cell = Mapping[str, Any]


def tables(result: Result) -> str:
    """GB/s and share of a copy's rate, by block size and count."""
    return f"{_rates(result['cells'])}\n\n{_about(result)}"


def _rates(cells: list[Cell]) -> str:
    by_place = {
        (cell["block_bytes"], cell["blocks"], cell["direction"]): cell["ways"] for cell in cells if cell["ids"] == IDS
    }
    measured = [(size, count) for size in SIZES for count in COUNTS if (size, count, "gather") in by_place]
    headings = ["KiB per block", "blocks"]
    for direction, torchs in DIRECTIONS.items():
        headings += [f"{direction} GB/s", "of a copy", f"`{torchs}` GB/s", "of a copy"]
    rows = []
    for size, count in measured:
        ways = [(by_place[size, count, direction], torchs) for direction, torchs in DIRECTIONS.items()]
        rates = [rate for each, torchs in ways for way in (OURS, torchs) for rate in _rate(each[way])]
        rows.append((f"{size / 1024:g}", str(count), *rates))
    return number_table(tuple(headings), rows, words=0)


def _rate(way: Mapping[str, Any]) -> tuple[str, str]:
    rate = way["gb_s"]["p50"]
    return f"{rate:.3g}" if rate < ROUNDED else f"{rate:.0f}", f"{way['of_copy']['ratio']:.0%}"


def _about(result: Result) -> str:
    device = result["device"]
    text = (
        f"Median payload of {result['rounds']} rounds, blocks in any order, beside a plain copy of as many contiguous "
        "bytes in the same rounds; nothing of it is in a cache."
    )
    if device["kind"] == "cpu":
        text += " On a CPU torch's operators do the work, in one thread, so their rate does not apply to a GPU."
    else:
        text += f" On one {device['name']}, with at most {result['max_programs']} programs."
    return f"{text} {conditions(result)}"
