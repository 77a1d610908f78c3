"""By prompt length, for each mode: time to first token, its ratio to another mode's, and exposed time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.plot.canvas import colours, curve, figure, logarithmic
from bench.plot.series import Series, in_order, places

REFERENCES = ("request", "aggregated", "push", "pull")
"""Modes for comparisons. The picture takes the one with the most ratios."""
ASIDE = 1.03
Panel = Callable[[Any, Mapping[str, Sequence[Series]], Mapping[str, str]], None]


def draw(series: Sequence[Series], path: Path, title: str) -> None:
    """A row for each link and load; columns for the time to first token, the ratios and the exposed time, if known.

    Where only the exposed time is known, two panels share a row.
    """
    every = places(series)
    panels: list[Panel] = [_times, _ratios] if any(one.ttft_ms for one in series) else []
    panels += [_exposed] if any(one.exposed_ms for one in series) else []
    chosen = colours(list(in_order(series)))
    beside = 2 if len(panels) == 1 < len(every) else 1
    with figure(-(-len(every) // beside), beside * len(panels), path, title) as grid:
        for row, where in zip_longest(grid.reshape(-1, len(panels)), every):
            if where is None:
                row[0].set_axis_off()
                continue
            here = in_order(one for one in series if one.where == where)
            for panel, fill in zip(row, panels, strict=True):
                fill(panel, here, chosen)
            row[0].set_title(f"{where}: {row[0].get_title('left')}", loc="left", fontsize="medium")
        grid[0][0].legend(fontsize="small")


def _times(panel: Any, modes: Mapping[str, Sequence[Series]], chosen: Mapping[str, str]) -> None:
    for mode, same in modes.items():
        curve(panel, [one.tokens for one in same], [one.ttft_ms for one in same], chosen[mode], mode)
    _by_length(panel, modes)
    logarithmic(panel, "y")
    panel.set_title("time to first token", loc="left", fontsize="medium")
    panel.set_ylabel("milliseconds")


def _ratios(panel: Any, modes: Mapping[str, Sequence[Series]], chosen: Mapping[str, str]) -> None:
    """Ratios with 95 % intervals. Modes stand a little apart, so that no interval hides another."""
    reference = max(REFERENCES, key=lambda mode: sum(mode in one.ratios for same in modes.values() for one in same))
    panel.axhline(1, color=chosen.get(reference, "grey"), lw=1)
    for number, (mode, same) in enumerate(modes.items()):
        shared = [one for one in same if reference in one.ratios]
        if not shared:
            continue
        ratios = [one.ratios[reference] for one in shared]
        middle = [each.ratio for each in ratios]
        bars = [[each.ratio - each.low for each in ratios], [each.high - each.ratio for each in ratios]]
        beside = [one.tokens * ASIDE ** (number - len(modes) / 2) for one in shared]
        panel.errorbar(beside, middle, bars, fmt="o-", color=chosen[mode], ms=4, lw=1.2)
    _by_length(panel, modes)
    panel.set_title(f"of {reference}'s time to first token", loc="left", fontsize="medium")
    panel.set_ylabel("ratio of medians, 95 % interval")


def _exposed(panel: Any, modes: Mapping[str, Sequence[Series]], chosen: Mapping[str, str]) -> None:
    for mode, same in modes.items():
        traced = [one for one in same if one.exposed_ms]
        if traced:
            curve(panel, [one.tokens for one in traced], [one.exposed_ms for one in traced], chosen[mode], mode)
    _by_length(panel, modes)
    panel.set_title("exposed after prefill", loc="left", fontsize="medium")
    panel.set_ylabel("milliseconds")
    panel.set_ylim(bottom=0)


def _by_length(panel: Any, modes: Mapping[str, Sequence[Series]]) -> None:
    logarithmic(panel, "x", sorted({one.tokens for same in modes.values() for one in same}))
    panel.set_xlabel("prompt tokens")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
