"""The tables of the documentation, from the JSON of ``python -m bench.forward``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.markdown import Result, conditions, number_table, with_interval

AUTO, LAYER, CHUNK, REFERENCE = "auto", "layer", "chunk", "request"
DELAYS = ("computing", "for_a_core", "for_the_lock")


def table(result: Result) -> str:
    """One row for each link, model, prompt length and pattern of blocks; below it the cases beyond a limit.

    The columns after the exposed times are those of ``auto``, or of ``layer`` where a result lacks ``auto``.
    """
    cells = result["cells"]
    modes = list(cells[0]["modes"])
    early = AUTO if AUTO in modes else LAYER
    beside = [other for other in (LAYER, CHUNK) if early == AUTO and other in modes]
    headings = (
        *("model", "link", "blocks", "tokens", "load"),
        *(f"exposed by `{mode}`" for mode in modes),
        *("of request's", "limit", "end", "forward", "computing", "for a core", "for the lock", "hook"),
        *(f"forward of {other}'s" for other in beside),
        *(f"exposed of {other}'s" for other in beside),
    )
    rows = number_table(headings, [_row(cell, modes, early, beside) for cell in cells], words=3)
    missed = sum(bool(cell["misses"]) for cell in cells)
    by = "by layer" if early == LAYER else f"in mode `{early}`"
    about = (
        f"Medians of {result['rounds']} rounds. Load: time of all bytes on the wire over that of the forward. End: the "
        f"end of a push {by} over max(forward, transfer) plus one layer. Forward: with a push {by} over one without, "
        "with its 95 % interval. Computing, for a core, for the lock: mean parts of the additional time, in percent of "
        "the forward without a push; the thread computes, waits for a core, or sleeps, on a CPU until Python's lock is "
        "free. Hook: one call on that thread. "
        f"In {missed} of {len(cells)} cases a figure is beyond its limit; the JSON names it."
    )
    return f"{rows}\n\n{about} {conditions(result)}"


def _row(cell: Mapping[str, Any], modes: list[str], early: str, beside: list[str]) -> tuple[str, ...]:
    exposed = [f"{1e3 * cell['modes'][mode]['exposed_s_median']:.1f} ms" for mode in modes]
    pushed = cell["modes"].get(early)
    rest: tuple[str, ...] = ("",) * (8 + 2 * len(beside))
    if pushed is not None:
        share = pushed.get(f"exposed_of_{REFERENCE}")
        rest = (
            f"{share['ratio']:.3f}" if share else "",
            f"{cell['exposed_limit']:.3f}" if cell["exposed_limit"] is not None else "",
            f"{pushed['end_of_bound']:.3f}",
            with_interval(pushed["slowdown"]),
            *(f"{100 * pushed['delays'][part]:+.1f} %" if pushed["delays"] else "" for part in DELAYS),
            f"{pushed['hook_us']['p50']:.1f} µs",
            *(with_interval(pushed[f"forward_of_{other}"]) for other in beside),
            *(with_interval(pushed[f"exposed_of_{other}"]) for other in beside),
        )
    return (cell["model"], cell["link"], cell["ids"], str(cell["tokens"]), f"{cell['load']:.2f}", *exposed, *rest)


def cached_table(result: Result) -> str:
    """One row for each prompt and share of it that P has in its prefix cache."""
    cells = result["cells"]
    modes = list(cells[0]["modes"])
    headings = (
        *("model", "tokens", "cached"),
        *(f"exposed by `{mode}`" for mode in modes),
        *(f"early by `{mode}`" for mode in modes if mode != REFERENCE),
    )
    rows = number_table(headings, [_cached_row(cell, modes) for cell in cells], words=1)
    about = (
        f"Medians of {result['rounds']} rounds. Early: the share of descriptors that P posts before the third layer's "
        "hook of the forward."
    )
    return f"{rows}\n\n{about} {conditions(result)}"


def _cached_row(cell: Mapping[str, Any], modes: list[str]) -> tuple[str, ...]:
    early = [statistics.median(cell["modes"][mode]["raw"]["early"]) for mode in modes if mode != REFERENCE]
    return (
        cell["model"],
        str(cell["tokens"]),
        f"{cell['cached']} %",
        *(f"{1e3 * cell['modes'][mode]['exposed_s_median']:.1f} ms" for mode in modes),
        *(f"{share:.2f}" for share in early),
    )
