"""Tables of the cells and of the lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from itertools import groupby

from rich.table import Table

from bench.forward.cells import Cell, Delays
from bench.forward.growth import COUNTED, Line


def line(cell: Cell) -> str:
    """One case, while a run goes on."""
    exposed = "  ".join(f"{mode} {1e3 * cell.series[mode].median('exposed_s'):.1f}" for mode in cell.modes)
    forward = f"forward {1e3 * cell.forward_s:.0f} ms, wire {1e3 * cell.wire_s:.0f} ms"
    return f"{cell.link}  {cell.case!s:32} {forward}, exposed ms: {exposed}"


def tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """For each link: every case and mode."""
    for link, group in groupby(cells, key=lambda cell: cell.link):
        here = list(group)
        ceilings = [cell.ceiling / 1e9 for cell in here]
        title = f"{link}: one descriptor goes at {min(ceilings):.3g} to {max(ceilings):.3g} GB/s"
        table = Table(title=title, title_justify="left")
        for heading in ("case", "MiB", "forward ms", "load", "mode"):
            table.add_column(heading, justify="left" if heading in ("case", "mode") else "right")
        for heading in ("exposed ms", "of request", "GB/s", "of ceiling", "posting", "end/bound", "forward"):
            table.add_column(heading, justify="right")
        for heading in ("cpu/core/lock", "hook us", "writer ms"):
            table.add_column(heading, justify="right")
        for cell in here:
            for index, mode in enumerate(cell.modes):
                table.add_row(*(_case(cell) if index == 0 else ("",) * 4), mode, *_figures(cell, mode))
        table.caption = (
            "load: all bytes at the ceiling over the forward without a push. of request: exposed, over that of mode "
            "request. posting: share of the transfer. end/bound: when the last WRITE landed, over max(forward, "
            "transfer) and one layer. forward: over the one without a push, with its 95 % interval. cpu/core/lock: "
            "mean parts of the difference: the thread computes, waits for a core, sleeps (on a CPU for Python's lock). "
            "hook: p50 / p99. writer: processor time of P's writer thread."
        )
        yield table


def growth(lines: Sequence[Line]) -> Table:
    """The straight lines."""
    table = Table(title="Growth of a forward's costs", title_justify="left")
    for heading in ("with", "mode", "cost", "measured", "for one more", "for none", "R2"):
        table.add_column(heading, justify="left" if heading in ("with", "mode", "cost") else "right")
    for each in lines:
        measured = ", ".join(
            f"{value}: {_cost(each, figure)}" for value, figure in zip(each.values, each.figures, strict=True)
        )
        ends = (_cost(each, each.slope), _cost(each, each.intercept))
        table.add_row(each.what, each.mode, each.cost, measured, *ends, f"{each.r2:.3f}")
    table.caption = "In milliseconds; WRITEs are a number."
    return table


def _cost(line: Line, figure: float) -> str:
    return f"{figure if line.cost in COUNTED else 1e3 * figure:.3g}"


def missed(cells: Sequence[Cell]) -> list[str]:
    """The missed limits of all cells, in words."""
    return [f"{cell.link}, {cell.case}: {text}" for cell in cells for text in cell.misses]


def _case(cell: Cell) -> tuple[str, str, str, str]:
    return str(cell.case), f"{cell.case.bytes / (1 << 20):.0f}", f"{1e3 * cell.forward_s:.0f}", f"{cell.load:.2f}"


def _figures(cell: Cell, mode: str) -> tuple[str, ...]:
    series = cell.series[mode]
    of_request = "" if mode == "request" or "request" not in cell.modes else _share(cell, mode)
    return (
        f"{1e3 * series.median('exposed_s'):.1f}",
        of_request,
        f"{cell.rate(mode) / 1e9:.3g}",
        f"{cell.rate(mode) / cell.ceiling:.2f}",
        f"{cell.post_share(mode):.0%}",
        f"{cell.end_ratio(mode):.3f}",
        str(cell.slowdown(mode)),
        _delays(cell.delays(mode)),
        f"{series.hook_percentile(50):.1f} / {series.hook_percentile(99):.1f}",
        f"{1e3 * series.median('writer_s'):.1f}",
    )


def _share(cell: Cell, mode: str) -> str:
    share = f"{cell.exposed_ratio(mode, 'request').ratio:.3f}"
    return (
        f"{share} (2/L {cell.exposed_limit:.3f})"
        if mode in ("auto", "layer") and cell.exposed_limit is not None
        else share
    )


def _delays(delays: Delays | None) -> str:
    return "" if delays is None else " / ".join(f"{each:+.1%}" for each in astuple(delays))
