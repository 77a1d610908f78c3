"""The picture: exposed time in every case, and the straight lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from bench.forward.cells import Cell
from bench.forward.growth import COSTS, Line

COLOURS = {"layer": "#4c9fd4", "chunk": "#f2b134", "request": "#c45bb0"}


def plot(cells: Sequence[Cell], lines: Sequence[Line], path: Path, title: str) -> None:
    """A row for each link, then one for each thing that grew."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    links = [(link, list(group)) for link, group in groupby(cells, key=lambda cell: cell.link)]
    grown = [(what, list(group)) for what, group in groupby(lines, key=lambda line: line.what)]
    size = (4 * len(COSTS), 3.5 * (len(links) + len(grown)))
    figure = plt.figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(len(links) + len(grown), len(COSTS))
    for row, (link, there) in enumerate(links):
        _bars(figure.add_subplot(grid[row, :]), link, there)
    for row, (what, fitted) in enumerate(grown, len(links)):
        for column, cost in enumerate(COSTS):
            _lines(figure.add_subplot(grid[row, column]), what, cost, [each for each in fitted if each.cost == cost])
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _bars(panel: Any, link: str, cells: Sequence[Cell]) -> None:
    modes = list(dict.fromkeys(mode for cell in cells for mode in cell.modes))
    width = 0.8 / len(modes)
    for index, mode in enumerate(modes):
        times = [1e3 * cell.series[mode].median("exposed_s") for cell in cells]
        panel.bar(np.arange(len(cells)) + index * width, times, width, label=mode, color=COLOURS[mode])
    panel.set_xticks(np.arange(len(cells)) + 0.4 - width / 2, [_label(cell) for cell in cells], fontsize="x-small")
    panel.set_yscale("log")
    panel.set(ylabel="exposed, ms")
    panel.set_title(f"{link}: exposed time (below: transfer over forward)", loc="left", fontsize="medium")
    panel.legend(fontsize="small")


def _label(cell: Cell) -> str:
    return f"{cell.case}".replace(" ", "\n") + f"\nload {cell.load:.2f}"


def _lines(panel: Any, what: str, cost: str, lines: Sequence[Line]) -> None:
    for line in lines:
        values = np.asarray(line.values)
        colour = COLOURS[line.mode]
        panel.plot(values, 1e3 * np.asarray(line.seconds), "o", color=colour)
        fitted = line.intercept_s + line.slope_s * values
        panel.plot(
            values, 1e3 * fitted, color=colour, label=f"{line.mode}: {1e6 * line.slope_s:.3g} us, R2 {line.r2:.2f}"
        )
    panel.set(xlabel=what, ylabel="ms")
    panel.set_title(cost, loc="left", fontsize="medium")
    panel.legend(fontsize="xx-small")
