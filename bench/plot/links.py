"""By the speed of an emulated link, for each mode: time to first token and exposed time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.plot.canvas import colours, curve, figure, logarithmic
from bench.plot.series import ResultError, Series, in_order

TITLES = {"ttft_ms": "time to first token", "exposed_ms": "exposed after prefill"}


def speeds(series: Sequence[Series]) -> list[float]:
    """The link speeds in Gb/s at which something was measured, each once."""
    return sorted({one.where.gbit for one in series if one.where.gbit is not None})


def draw(series: Sequence[Series], path: Path, title: str) -> None:
    """A row for each prompt length and load. Raises ``ResultError`` for fewer than two speeds."""
    emulated = [one for one in series if one.where.gbit is not None]
    if len(speeds(emulated)) < 2:
        raise ResultError("a sweep of link speeds takes results from two speeds or more")
    points = sorted({(one.tokens, _rest(one)) for one in emulated})
    shown = [measure for measure in TITLES if any(getattr(one, measure) for one in emulated)]
    chosen = colours(list(in_order(emulated)))
    with figure(len(points), len(shown), path, title) as grid:
        for row, (tokens, rest) in zip(grid, points, strict=True):
            here = [one for one in emulated if (one.tokens, _rest(one)) == (tokens, rest)]
            name = ", ".join(filter(None, (f"{tokens} tokens", rest)))
            for panel, measure in zip(row, shown, strict=True):
                _panel(panel, here, chosen, measure)
                panel.set_title(TITLES[measure], loc="left", fontsize="medium")
            row[0].set_title(f"{name}: {TITLES[shown[0]]}", loc="left", fontsize="medium")
        grid[0][0].legend(fontsize="small")


def _rest(one: Series) -> str:
    """The conditions, except the link."""
    return str(replace(one.where, link=""))


def _panel(panel: Any, series: Sequence[Series], chosen: dict[str, str], measure: str) -> None:
    for mode, same in in_order(series).items():
        by_speed = sorted((one.where.gbit or 0.0, getattr(one, measure)) for one in same if getattr(one, measure))
        if by_speed:
            gbits, samples = zip(*by_speed, strict=True)
            curve(panel, gbits, samples, chosen[mode], mode)
    logarithmic(panel, "x", speeds(series))
    logarithmic(panel, "y")
    panel.set_xlabel("Gb/s of the link")
    panel.set_ylabel("milliseconds")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
