"""The table of the documentation, from the JSON of ``python -m bench.forward``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.markdown import Result, conditions, number_table, with_interval

LAYER, REFERENCE = "layer", "request"
DELAYS = ("computing", "for_a_core", "for_the_lock")


def table(result: Result) -> str:
    """One row for each link, model, prompt length and pattern of blocks; below it the cases beyond a limit."""
    cells = result["cells"]
    modes = list(cells[0]["modes"])
    headings = (
        *("model", "link", "blocks", "tokens", "load"),
        *(f"exposed by `{mode}`" for mode in modes),
        *("of request's", "limit", "end", "forward", "computing", "for a core", "for the lock", "hook"),
    )
    rows = number_table(headings, [_row(cell, modes) for cell in cells], words=3)
    missed = sum(bool(cell["misses"]) for cell in cells)
    about = (
        f"Medians of {result['rounds']} rounds. Load: time of all bytes on the wire over that of the forward. End: the "
        "end of a push by layer over max(forward, transfer) plus one layer. Forward: with a push by layer over one "
        "without, with its 95 % interval. Computing, for a core, for the lock: mean parts of the additional time, in "
        "percent of the forward without a push; the thread computes, waits for a core, or sleeps, on a CPU until "
        "Python's lock is free. Hook: one call on that thread. "
        f"In {missed} of {len(cells)} cases a figure is beyond its limit; the JSON names it."
    )
    return f"{rows}\n\n{about} {conditions(result)}"


def _row(cell: Mapping[str, Any], modes: list[str]) -> tuple[str, ...]:
    exposed = [f"{1e3 * cell['modes'][mode]['exposed_s_median']:.1f} ms" for mode in modes]
    layer = cell["modes"].get(LAYER)
    rest: tuple[str, ...] = ("",) * 8
    if layer is not None:
        share = layer.get(f"exposed_of_{REFERENCE}")
        rest = (
            f"{share['ratio']:.3f}" if share else "",
            f"{cell['exposed_limit']:.3f}" if cell["exposed_limit"] is not None else "",
            f"{layer['end_of_bound']:.3f}",
            with_interval(layer["slowdown"]),
            *(f"{100 * layer['delays'][part]:+.1f} %" if layer["delays"] else "" for part in DELAYS),
            f"{layer['hook_us']['p50']:.1f} µs",
        )
    return (cell["model"], cell["link"], cell["ids"], str(cell["tokens"]), f"{cell['load']:.2f}", *exposed, *rest)
