"""Shared by all pictures: colours of modes, axes, and the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

PANEL_INCHES = (5.2, 3.9)
DPI = 110
COLOURS = {
    "auto": "#b0127b",
    "layer": "#d9541e",
    "chunk": "#f2b134",
    "request": "#4c9fd4",
    "push": "#3f8f5b",
    "pull": "#8f7fb8",
    "aggregated": "#222222",
}
OTHERS = ("#7f4f24", "#e377c2", "#17becf", "#bcbd22")
"""Colours for modes that ``COLOURS`` lacks, one after the other."""
BAND = (10, 90)


def colours(modes: Sequence[str]) -> dict[str, str]:
    """A colour for each mode. A mode in ``COLOURS`` has the same one in every picture."""
    unknown = [mode for mode in modes if mode not in COLOURS]
    spare = {mode: OTHERS[index % len(OTHERS)] for index, mode in enumerate(unknown)}
    return {mode: COLOURS.get(mode) or spare[mode] for mode in modes}


@contextmanager
def figure(rows: int, columns: int, path: Path, title: str) -> Iterator[Any]:
    """A grid of panels, ``grid[row][column]``. Writes the file if the block ends without an error.

    Equal panels make equal files: an SVG has no date.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    size = (columns * PANEL_INCHES[0], rows * PANEL_INCHES[1] + 0.4)
    picture, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    try:
        yield grid
        picture.suptitle(title, x=0.01, ha="left", fontsize="large")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=DPI, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
    finally:
        plt.close(picture)


def curve(panel: Any, points: Sequence[float], samples: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """Medians as a line; four fifths of the samples as a band."""
    panel.plot(points, [float(np.median(each)) for each in samples], "o-", color=colour, label=label, ms=4, lw=1.4)
    low, high = ([float(np.percentile(each, share)) for each in samples] for share in BAND)
    panel.fill_between(points, low, high, color=colour, alpha=0.15, lw=0)


def logarithmic(panel: Any, axis: str, ticks: Sequence[float] = ()) -> None:
    """Plain numbers on the logarithmic axis "x" or "y", at ``ticks`` if there are any."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    panel.set(**{f"{axis}scale": "log"})
    numbered = getattr(panel, f"{axis}axis")
    numbered.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    numbered.set_minor_formatter(FuncFormatter(_few))
    if ticks:
        numbered.set_major_locator(FixedLocator(list(ticks)))
        numbered.set_minor_formatter(NullFormatter())


def _few(value: float, _position: int | None = None) -> str:
    """The label of a minor tick: only 2 and 5 times a power of ten have one."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""
