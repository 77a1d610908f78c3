"""What a person reads of the cells: where which plan is the best, and where auto is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from bench.push.cells import FIXED, LIMIT, Cell
from layerpush.transport.packing.cost_model import Costs

CONSTANTS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "us for each of 1000 descriptors": lambda costs: 1e3 * Costs(scattered=costs["scattered"]).scattered_s(1000),
    "GB/s on the wire": lambda costs: 1e-9 / max(costs["wire_s"], 1e-15),
    "GB/s copied": lambda costs: 1e-9 / max(costs["gather_s"], 1e-15),
    "ms of messages": lambda costs: 1e3 * costs["messages_s"],
}
COLOURS = {"direct": "cyan", "gathered": "yellow", "packed": "magenta"}


def line(cell: Cell) -> str:
    """One point, while a run goes on."""
    times = "  ".join(f"{way} {milliseconds(series.median_s)}" for way, series in cell.ways.items())
    return f"{cell.link}  {cell.point!s:28} ms: {times} ({cell.chosen})"


def maps(cells: Sequence[Cell]) -> Iterator[Table]:
    """For each link and pattern: the best plan by block size and count, and what it takes of direct's time."""
    for (link, ids), group in grouped(cells):
        counts = sorted({cell.point.blocks for cell in group})
        table = Table(title=f"{link}, {ids}: the best plan, and its time as a share of direct's", title_justify="left")
        table.add_column("KiB per block", justify="right")
        for count in counts:
            table.add_column(f"{count} blocks", justify="right")
        for size, row in groupby(group, key=lambda cell: cell.point.block_bytes):
            by_count = {cell.point.blocks: cell for cell in row}
            table.add_row(f"{size / 1024:g}", *(_best(by_count.get(count)) for count in counts))
        table.caption = f"! auto takes more than {LIMIT:.2f} x the time of the best plan or of direct; !! for sure"
        yield table


def misses(cells: Sequence[Cell]) -> Table | None:
    """Each point at which auto is too slow, with the model's estimates beside what was measured."""
    missed = [cell for cell in cells if cell.misses]
    if not missed:
        return None
    table = Table(title="Where auto is too slow: measured ms (estimated ms)", title_justify="left")
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
    """The constants that auto went by, and what its estimates are worth: measured over estimated, by plan."""
    table = Table(title="What auto went by, and median of measured over estimated time", title_justify="left")
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


def grouped(cells: Sequence[Cell]) -> Iterator[tuple[tuple[str, str], list[Cell]]]:
    """By link and pattern, in the order in which they were measured."""
    for key in dict.fromkeys((cell.link, cell.point.ids) for cell in cells):
        here = [cell for cell in cells if (cell.link, cell.point.ids) == key]
        yield key, sorted(here, key=lambda cell: (cell.point.block_bytes, cell.point.blocks))


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _best(cell: Cell | None) -> Text:
    if cell is None:
        return Text("")
    share = cell.ratio(cell.best, "direct").ratio
    mark = ("!!" if cell.is_sure else "!") if cell.misses else ""
    return Text(f"{cell.best} {share:.2f} {mark:2}", style=COLOURS[cell.best])


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
