"""A picture of an estimate: exposed time by the speed of the link, a line for each mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from layerpush.apps.estimate.estimate import MODES, PromptEstimate
from layerpush.apps.tracing.picture import panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"auto": "#b0127b", "layer": "#d9541e", "request": "#4c9fd4"}
POINTS, SLOWER, FASTER = 19, 0.25, 64.0
"""The picture has so many speeds, from and to these multiples of the one that just keeps up."""


def draw_prompt(prompt: PromptEstimate, path: Path) -> None:
    """The file's ending chooses the format. Raises ``PictureError`` without matplotlib, or for an unknown ending."""
    with panel_grid(path, [4.0], 1, COLOURS, width=8) as ((axes,),):
        draw(axes, prompt)


def draw(axes: Axes, prompt: PromptEstimate) -> None:
    estimate, slowest = prompt.estimate, SLOWER * prompt.keeps_up_from
    rates = [slowest * (FASTER / SLOWER) ** (point / (POINTS - 1)) for point in range(POINTS)]
    for mode in MODES:
        wires = [replace(estimate.wire, rate=rate) for rate in rates]
        times = [1e3 * estimate.push(prompt.tokens, mode, wire).exposed_s for wire in wires]
        style = "--" if mode == "layer" else "-"  # it often lies under ``auto``
        axes.plot([rate / 1e9 for rate in rates], times, style, color=COLOURS[mode], label=mode, lw=1.8)
    axes.axvspan(rates[0] / 1e9, prompt.keeps_up_from / 1e9, color="#8c8c8c", alpha=0.15, lw=0)
    axes.axvline(estimate.wire.rate / 1e9, color="black", lw=0.8)
    title = f"{estimate.model.name}, {prompt.tokens:,} tokens; grey: the link does not keep up; line: --link"
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set(xscale="log", yscale="log", xlabel="GB/s for each rank", ylabel="exposed, milliseconds")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
