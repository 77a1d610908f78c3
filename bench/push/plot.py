"""The picture of bench.push: the best plan at each point, and the times of all plans by block size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.plot.canvas import figure
from bench.push.cells import FIXED, WAYS, Cell

COLOURS = {"direct": "#4c9fd4", "gathered": "#f2b134", "packed": "#c45bb0", "auto": "black"}


def plot(cells: Sequence[Cell], path: Path, title: str) -> None:
    """A column for each pattern of ids, two rows for each link."""
    links = list(dict.fromkeys(cell.link for cell in cells))
    patterns = list(dict.fromkeys(cell.point.ids for cell in cells))
    with figure(2 * len(links), len(patterns), path, title) as grid:
        for (link, ids), group in _grouped(cells):
            row, column = 2 * links.index(link), patterns.index(ids)
            _map(grid[row][column], group)
            grid[row][column].set_title(
                f"{link}, {ids}: best plan, share of direct's time", loc="left", fontsize="medium"
            )
            _curves(grid[row + 1][column], group)
        for row in grid[1::2]:
            row[-1].legend(fontsize="small")


def _grouped(cells: Sequence[Cell]) -> Iterator[tuple[tuple[str, str], list[Cell]]]:
    """The cells by link and pattern, in the order of measurement."""
    for key in dict.fromkeys((cell.link, cell.point.ids) for cell in cells):
        here = [cell for cell in cells if (cell.link, cell.point.ids) == key]
        yield key, sorted(here, key=lambda cell: (cell.point.block_bytes, cell.point.blocks))


def _map(panel: Any, cells: Sequence[Cell]) -> None:
    sizes, counts = (sorted({getattr(cell.point, name) for cell in cells}) for name in ("block_bytes", "blocks"))
    for cell in cells:
        x, y = sizes.index(cell.point.block_bytes), counts.index(cell.point.blocks)
        colour, share = COLOURS[cell.best], cell.ratio(cell.best, "direct").ratio
        missed = ("!!" if cell.is_sure else "!") if cell.misses else ""
        panel.add_patch(_square(x, y, colour))
        panel.text(x, y, f"{share:.2f}{missed}", ha="center", va="center", fontsize="x-small")
    panel.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(-0.5, len(counts) - 0.5), ylabel="blocks")
    panel.set_xticks(range(len(sizes)), [f"{size / 1024:g}" for size in sizes])
    panel.set_yticks(range(len(counts)), [str(count) for count in counts])


def _square(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", alpha=0.7)


def _curves(panel: Any, cells: Sequence[Cell]) -> None:
    """Draw the count with the most block sizes; of several such counts, the largest."""
    counts = [cell.point.blocks for cell in cells]
    count = max(set(counts), key=lambda each: (counts.count(each), each))
    here = [cell for cell in cells if cell.point.blocks == count]
    for way in WAYS:
        usable = [cell for cell in here if way not in FIXED or way in cell.possible]
        points = [(cell.point.block_bytes / 1024, cell.ratio(way, "direct")) for cell in usable]
        if points:
            kib, ratios = zip(*points, strict=True)
            style = "--" if way == "auto" else "-"
            panel.plot(kib, [ratio.ratio for ratio in ratios], "o" + style, color=COLOURS[way], label=way)
            panel.fill_between(kib, [r.low for r in ratios], [r.high for r in ratios], color=COLOURS[way], alpha=0.15)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    for axis in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
        axis("{x:g}")
    sizes = sorted({cell.point.block_bytes / 1024 for cell in here})
    panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
    panel.set(xlabel="KiB per block", ylabel=f"time over direct's, {count} blocks")
