"""Tables of the best plans, for a terminal and for the documentation, from the JSON of ``bench.push``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.markdown import Result, conditions, number_table
from bench.push.cells import LIMIT, in_words

PUBLISHED = {"random": "blocks in any order on both sides", "random-p": "any order on P, one run on D"}
"""The patterns with a table in the documentation. The others have less to pack, or nothing."""
LINKS = {"shm": "shared memory", "tcp": "TCP over loopback", "cuda_ipc": "CUDA IPC, on one GPU"}

AGAINST = ("to_best", "to_direct")

Cell = Mapping[str, Any]


def summary(result: Result) -> str:
    """One paragraph: at how many points auto is as good as the best plan."""
    cells = result["cells"]
    right = sum(_median(cell, cell["auto"]["chose"]) / _median(cell, cell["best"]) <= LIMIT for cell in cells)
    met, sure = sum(not cell["auto"]["misses"] for cell in cells), sum(map(_is_sure, cells))
    best, direct = (max(cell["auto"][against]["ratio"] for cell in cells) for against in AGAINST)
    text = in_words(len(cells), right, met, sure, best, direct)
    ucx = {about["ucx"] for about in result["about"].values()}
    versions = {"versions": {"ucx": ", ".join(sorted(ucx)), **result["versions"]}}
    return f"{text} {conditions({**result, **versions})}"


def tables(result: Result, patterns: Mapping[str, str] = PUBLISHED) -> str:
    """For each link and pattern the best plan by block size and count, and auto's share of its time."""
    cells = result["cells"]
    parts = [summary(result)]
    for link in dict.fromkeys(cell["link"] for cell in cells):
        for ids, meaning in patterns.items():
            here = [cell for cell in cells if (cell["link"], cell["ids"]) == (link, ids)]
            if here:
                parts += [f"Over {LINKS.get(link, link)}, {meaning}:", _table(here)]
    parts.append(
        f"Each cell: the plan with the lowest median of {result['rounds']} rounds, its time as a share of direct's, "
        "and, after the comma, auto's time as a share of that plan's. **Bold**: auto takes more than "
        f"{LIMIT:g} times as long as the best plan or as direct; with an exclamation mark, the whole "
        "95 % interval is above that."
    )
    return "\n\n".join(parts)


def _table(cells: Sequence[Cell]) -> str:
    counts = sorted({cell["blocks"] for cell in cells})
    by_place = {(cell["block_bytes"], cell["blocks"]): cell for cell in cells}
    rows = [
        (f"{size / 1024:g} KiB", *(_best(by_place.get((size, count))) for count in counts))
        for size in sorted({cell["block_bytes"] for cell in cells})
    ]
    return number_table(("per block", *(f"{count} blocks" for count in counts)), rows)


def _best(cell: Cell | None) -> str:
    """Empty where the WRITE would be too large."""
    if cell is None:
        return ""
    best, auto = cell["best"], cell["auto"]
    share = "" if best == "direct" else f" {cell['ways'][best]['of_direct']['ratio']:.2f}"
    to_best = f"{auto['to_best']['ratio']:.2f}"
    if auto["misses"]:
        to_best = f"**{to_best}{'!' if _is_sure(cell) else ''}**"
    return f"{best}{share}, {to_best}"


def _is_sure(cell: Cell) -> bool:
    """Whether the whole interval of a ratio is beyond the limit."""
    return any(cell["auto"][against]["low"] > LIMIT for against in AGAINST)


def _median(cell: Cell, way: str) -> float:
    median_s: float = cell["ways"][way]["median_s"]
    return median_s
