"""The tables of the documentation, from the JSON of ``python -m bench.forward``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.markdown import Result, conditions, number_table, with_interval

AUTO, LAYER, REFERENCE = "auto", "layer", "request"
VERIFY_TIMES = ("writer_s", "exposed_s", "handed_over_s")
DELAYS = ("computing", "for_a_core", "for_the_lock")


def table(result: Result) -> str:
    """One row for each link, model, prompt length and pattern of blocks; below it the cases beyond a limit.

    The columns after the exposed times are those of ``auto``, or of ``layer`` where a result lacks ``auto``.
    """
    cells = result["cells"]
    modes = list(cells[0]["modes"])
    early = AUTO if AUTO in modes else LAYER
    headings = (
        *("model", "link", "blocks", "tokens", "link use"),
        *(f"exposed by `{mode}`" for mode in modes),
        *(
            "of request's",
            "limit",
            "end",
            "forward",
            "computing",
            "for a core",
            "for the lock",
            "hook",
            "writer",
            "writer queued",
        ),
    )
    rows = number_table(headings, [_row(cell, modes, early) for cell in cells], words=3)
    missed = sum(bool(cell["misses"]) for cell in cells)
    by = "by layer" if early == LAYER else f"in mode `{early}`"
    about = (
        f"Medians of {result['rounds']} rounds. Link use: time of all bytes on the wire over that of the forward. End: "
        f"the end of a push {by} over max(forward, transfer) plus one layer. Forward: with a push {by} over one "
        "without, with its 95 % interval. Computing, for a core, for the lock: mean parts of the additional time, in "
        "percent of the forward without a push; the thread computes, waits for a core, or sleeps, on a CPU until "
        "Python's lock is free. Hook: one call on that thread. Writer: processor time of P's writer thread. Writer "
        "queued: time for which that thread waited for a core, maybe with Python's lock. "
        f"In {missed} of {len(cells)} cases a figure is beyond its limit; the JSON names it."
    )
    return f"{rows}\n\n{about} {_cores(result)} {conditions(result)}"


def short_table(result: Result) -> str:
    """One row for each link, model, prompt length and pattern of blocks: exposed times, and the forward's cost."""
    cells = result["cells"]
    modes = list(cells[0]["modes"])
    early = AUTO if AUTO in modes else LAYER
    headings = ("model", "link", "blocks", "tokens", "link use", *(f"`{mode}`" for mode in modes), "forward")
    rows = [(*_place(cell), *_exposed(cell, modes), with_interval(cell["modes"][early]["slowdown"])) for cell in cells]
    about = (
        f"Exposed times, medians of {result['rounds']} rounds. Link use: time of all bytes on the wire over that of "
        f"the forward. Forward: with a push in mode `{early}` over one without, with its 95 % interval."
    )
    return f"{number_table(headings, rows, words=3)}\n\n{about} {conditions(result)}"


def _place(cell: Mapping[str, Any]) -> tuple[str, ...]:
    return (cell["model"], cell["link"], cell["ids"], str(cell["tokens"]), f"{cell['load']:.2f}")


def _exposed(cell: Mapping[str, Any], modes: list[str]) -> list[str]:
    return [f"{1e3 * cell['modes'][mode]['exposed_s_median']:.1f} ms" for mode in modes]


def _row(cell: Mapping[str, Any], modes: list[str], early: str) -> tuple[str, ...]:
    pushed = cell["modes"].get(early)
    rest: tuple[str, ...] = ("",) * 10
    if pushed is not None:
        share = pushed.get(f"exposed_of_{REFERENCE}")
        rest = (
            f"{share['ratio']:.3f}" if share else "",
            f"{cell['exposed_limit']:.3f}" if cell["exposed_limit"] is not None else "",
            f"{pushed['end_of_bound']:.3f}",
            with_interval(pushed["slowdown"]),
            *(f"{100 * pushed['delays'][part]:+.1f} %" if pushed["delays"] else "" for part in DELAYS),
            f"{pushed['hook_us']['p50']:.1f} µs",
            f"{1e3 * statistics.median(pushed['raw']['writer_s']):.1f} ms",
            f"{1e3 * statistics.median(queued):.1f} ms" if (queued := pushed["raw"].get("writer_queued_s")) else "",
        )
    return (*_place(cell), *_exposed(cell, modes), *rest)


def _cores(result: Result) -> str:
    """The places of the threads, in a sentence."""
    cores = result["settings"].get("cores")
    if cores is None:
        return "P and D share all cores."
    forward, others = (", ".join(map(str, cores[part])) for part in ("forward", "others"))
    return f"The forward has core {forward} to itself; P's other threads and D have core {others}."


def long_table(result: Result) -> str:
    """One row for each model and prompt length: KV, and exposed time by each mode; below it the prompts left out."""
    cells = result["cells"]
    modes = list(cells[0]["modes"])
    headings = (
        *("model", "tokens", "MiB of KV", "link use"),
        *(f"exposed by `{mode}`" for mode in modes),
        *("of request's", "limit", "forward"),
    )
    rows = number_table(headings, [_long_row(cell, modes) for cell in cells], words=1)
    left_out = [
        f"{each['model']} with {each['tokens']} tokens ({each['memory_bytes'] / 2**30:.0f} GiB)"
        for each in result["left_out"]
    ]
    absent = f"Left out, with the memory of both sides: {', '.join(left_out)}. " if left_out else ""
    about = f"Medians of {result['rounds']} rounds, {cells[0]['chunk_tokens']} tokens a step."
    return f"{rows}\n\n{about} {absent}{_cores(result)} {conditions(result)}"


def _long_row(cell: Mapping[str, Any], modes: list[str]) -> tuple[str, ...]:
    pushed = cell["modes"][AUTO]
    return (
        cell["model"],
        str(cell["tokens"]),
        f"{cell['bytes'] / 2**20:.0f}",
        f"{cell['load']:.2f}",
        *_exposed(cell, modes),
        with_interval(pushed[f"exposed_of_{REFERENCE}"]),
        f"{cell['exposed_limit']:.3f}" if cell["exposed_limit"] is not None else "",
        with_interval(pushed["slowdown"]),
    )


def verify_table(result: Result) -> str:
    """One row for each prompt and mode: the cost of checksums."""
    rows = []
    for cell in result["cells"]:
        for mode, figures in cell["modes"].items():
            raw = figures["raw"]
            rows.append(
                (
                    str(cell["tokens"]),
                    f"`{mode}`",
                    f"{sum(map(bool, raw['verified']))} of {len(raw['verified'])}",
                    f"{max(raw['verified']):,}",
                    f"{figures['hook_us']['p50']:.1f} µs",
                    with_interval(figures["slowdown"]),
                    *(f"{1e3 * statistics.median(raw[name]):.1f} ms" for name in VERIFY_TIMES),
                )
            )
    model, kib = result["cells"][0]["model"], result["cells"][0]["block_bytes"] / 1024
    about = (
        f"Medians of {result['rounds']} rounds, KV of {model}: a part has {kib:g} KiB. Verified: pushes that were "
        "drawn. Parts: of such a push. Forward: over one without a push, with its 95 % interval. Writer: processor "
        "time of P's writer thread. Hand-over: from the last layer until D has the completion and has compared."
    )
    headings = ("tokens", "mode", "verified", "parts", "hook", "forward", "writer", "exposed", "hand-over")
    return f"{number_table(headings, rows, words=2)}\n\n{about} {_cores(result)} {conditions(result)}"
