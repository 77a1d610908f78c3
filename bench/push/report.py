"""Tables of the points at which auto is too slow, and of the cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from bench.push.cells import FIXED, Cell
from layerpush.transport.packing.cost_model import Costs

CONSTANTS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "us for each of 1000 descriptors": lambda costs: 1e3 * Costs(scattered=costs["scattered"]).scattered_s(1000),
    "GB/s on the wire": lambda costs: 1e-9 / max(costs["wire_s"], 1e-15),
    "GB/s copied": lambda costs: 1e-9 / max(costs["gather_s"], 1e-15),
    "ms of messages": lambda costs: 1e3 * costs["messages_s"],
}


def line(cell: Cell) -> str:
    """One point, while a run goes on."""
    times = "  ".join(f"{way} {milliseconds(series.median_s)}" for way, series in cell.ways.items())
    return f"{cell.link}  {cell.point!s:28} ms: {times} ({cell.chosen})"


def misses(cells: Sequence[Cell]) -> Table | None:
    """Each point at which auto is too slow, with measured and estimated times."""
    missed = [cell for cell in cells if cell.misses]
    if not missed:
        return None
    table = Table(title="Points at which auto is too slow: measured ms (estimated ms)", title_justify="left")
    for heading in ("link", "point", *FIXED, "auto chose", "ms", "of the best", "of direct"):
        table.add_column(heading, justify="left" if heading in ("link", "point", "auto chose") else "right")
    for cell in missed:
        table.add_row(
            cell.link,
            str(cell.point),
            *(_with_estimate(cell, plan) for plan in FIXED),
            cell.chosen,
            milliseconds(cell.ways["auto"].median_s),
            *(
                f"{ratio.ratio:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
                for ratio in (cell.auto_to_best, cell.auto_to_direct)
            ),
        )
    return table


def model(cells: Sequence[Cell]) -> Table:
    """The constants of the cost model, and measured over estimated time by plan."""
    table = Table(title="Constants of the cost model, and median of measured over estimated time", title_justify="left")
    table.add_column("link")
    table.add_column("KiB", justify="right")
    for name in (*CONSTANTS, *FIXED):
        table.add_column(name, justify="right")
    keyed = sorted(cells, key=lambda cell: (cell.link, cell.point.block_bytes))
    for (link, size), group in groupby(keyed, key=lambda cell: (cell.link, cell.point.block_bytes)):
        here = list(group)
        constants = [f"{shown(here[0].costs):.3g}" for shown in CONSTANTS.values()]
        table.add_row(link, f"{size / 1024:g}", *constants, *(_measured_over_estimated(here, plan) for plan in FIXED))
    return table


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _with_estimate(cell: Cell, plan: str) -> str:
    estimate = f"({milliseconds(cell.estimate_s[plan])})"
    return f"{milliseconds(cell.ways[plan].median_s)} {estimate}" if plan in cell.possible else "no room"


def _measured_over_estimated(cells: Sequence[Cell], plan: str) -> str:
    ratios = sorted(
        cell.ways[plan].median_s / cell.estimate_s[plan]
        for cell in cells
        if plan in cell.possible and cell.estimate_s[plan]
    )
    return f"{ratios[len(ratios) // 2]:.2f}" if ratios else ""
