"""Growth of a forward's costs: a column for each thing that grew, a row for each cost, a line for each mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.forward.growth import COUNTED, Line
from scripts.docgen.canvas import colours, figure

DIGITS = 6
"""Digits of a slope after the point: a sum of floating-point numbers that should be 0 is shown as 0."""
SHOWN = ("WRITEs", "writer's processor time", "exposed")


def lines_of(result: Mapping[str, Any]) -> list[Line]:
    """The lines of ``python -m bench.forward``'s JSON. A file of an older format, without ``figures``, has none."""
    return [Line(**line) for line in result.get("lines", ()) if "figures" in line]


def draw(lines: Sequence[Line], path: Path, title: str) -> None:
    """Measured figures as points, with the straight line through them and its slope."""
    every = list(dict.fromkeys(line.what for line in lines))
    chosen = colours(list(dict.fromkeys(line.mode for line in lines)))
    with figure(len(SHOWN), len(every), path, title) as grid:
        for row, cost in zip(grid, SHOWN, strict=True):
            for panel, what in zip(row, every, strict=True):
                for line in lines:
                    if (line.cost, line.what) == (cost, what):
                        _line(panel, line, chosen[line.mode])
                panel.set(xlabel=what, ylabel=cost if cost in COUNTED else f"{cost}, milliseconds", ylim=(0, None))
                panel.set_xticks(sorted({value for line in lines if line.what == what for value in line.values}))
                panel.grid(alpha=0.25)
                panel.spines[["top", "right"]].set_visible(False)
                panel.legend(fontsize="small", title=f"for one {what.removesuffix('s')} more", title_fontsize="small")


def _line(panel: Any, line: Line, colour: str) -> None:
    factor, unit = (1.0, "") if line.cost in COUNTED else (1e3, " ms")
    ends = (min(line.values), max(line.values))
    panel.plot(line.values, [factor * each for each in line.figures], "o", color=colour, ms=4)
    heights = [factor * (line.intercept + line.slope * end) for end in ends]
    slope = round(factor * line.slope, DIGITS) + 0.0  # no -0
    panel.plot(ends, heights, color=colour, lw=1.4, label=f"{line.mode} {slope:+.2g}{unit}")
