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
TORCHS = "index_select"
"""torch's operator for the same."""

Cell = Mapping[str, Any]


def tables(result: Result) -> str:
    """GB/s and share of a copy's rate, by block size and count."""
    return f"{_rates(result['cells'])}\n\n{_about(result)}"


def _rates(cells: list[Cell]) -> str:
    ways = {(cell["block_bytes"], cell["blocks"]): cell["ways"] for cell in cells if cell["ids"] == IDS}
    headings = ("KiB per block", "blocks", "gather GB/s", "of a copy", f"`{TORCHS}` GB/s", "of a copy")
    rows = [
        (f"{size / 1024:g}", str(count), *_rate(ways[size, count][OURS]), *_rate(ways[size, count][TORCHS]))
        for size in SIZES
        for count in COUNTS
        if (size, count) in ways
    ]
    return number_table(headings, rows, words=0)


def _rate(way: Mapping[str, Any]) -> tuple[str, str]:
    rate = way["gb_s"]["p50"]
    return f"{rate:.3g}" if rate < ROUNDED else f"{rate:.0f}", f"{way['of_copy']['ratio']:.0%}"


def _about(result: Result) -> str:
    text = (
        f"Median payload of {result['rounds']} rounds, blocks in any order, beside a plain copy of as many contiguous "
        f"bytes in the same rounds; nothing of it is in a cache. On one {result['device']['name']}, with at most "
        f"{result['max_programs']} programs."
    )
    return f"{text} {conditions(result)}"
