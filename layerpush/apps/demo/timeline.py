"""The picture: when each layer was computed, and when its KV was on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layerpush.apps.demo.trace_figures import figures_of, times_of, write_intervals
from layerpush.apps.tracing.intervals import compute_intervals
from layerpush.telemetry.trace_records import PushRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPUTE_COLOURS = ("#9bb8d3", "#5b87b2")
WRITE_COLOUR = "#d9541e"
EXPOSED_COLOUR = "#f6c945"


def draw_timeline(pushes: Mapping[str, PushRecord], path: Path) -> None:
    """One row of panels per mode: the whole push, and its end enlarged. The panels of a column share their time scale.

    Raises ``TraceError`` when a push was not completed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, grid = plt.subplots(
        len(pushes), 2, figsize=(15, 4.4 * len(pushes)), sharey=True, sharex="col", squeeze=False, layout="constrained"
    )
    for (whole, end), (mode, push) in zip(grid, pushes.items(), strict=True):
        figures = figures_of(push)
        _draw_push(whole, push, zero=times_of(push).first_planned)
        _draw_push(end, push, zero=times_of(push).last_ready)
        what = f"{push.tokens} tokens, {len(push.chunks)} chunks, {_counted(figures.writes, 'WRITE')}"
        whole.set_title(f"{mode}: {what}", loc="left")
        whole.set_ylabel("layer")
        end.set_title(f"{mode}: {figures.exposed_ms:.1f} ms exposed", loc="left")
    all_times = [times_of(push) for push in pushes.values()]
    longest = max(times.last_landed - times.first_planned for times in all_times)
    exposed = max(times.last_landed - times.last_ready for times in all_times)
    grid[0][0].set_xlim(0, 1e3 * longest * 1.01)
    grid[0][1].set_xlim(-1e3 * exposed, 1e3 * exposed * 1.05)
    grid[-1][0].set_xlabel("milliseconds since the first chunk was planned")
    grid[-1][1].set_xlabel("milliseconds since the last layer was ready")
    figure.legend(
        handles=[
            Patch(color=COMPUTE_COLOURS[1], label="computing the layer (shades alternate by chunk)"),
            Patch(color=WRITE_COLOUR, label="WRITE, from post to landed"),
            Patch(color=EXPOSED_COLOUR, label="exposed: last layer ready to last WRITE landed"),
        ],
        loc="outside lower center",
        ncols=3,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_push(axes: Axes, push: PushRecord, zero: float) -> None:
    """Upper half of a layer's row: computation. Lower half: the WRITEs that carried it. Milliseconds from ``zero``."""
    times = times_of(push)
    axes.axvspan(1e3 * (times.last_ready - zero), 1e3 * (times.last_landed - zero), color=EXPOSED_COLOUR, alpha=0.45)
    layers = 1
    for chunk, layer, start, end in compute_intervals(push):
        left, width = 1e3 * (start - zero), 1e3 * (end - start)
        axes.barh(layer - 0.22, width, left=left, height=0.44, color=COMPUTE_COLOURS[chunk % 2])
        layers = max(layers, layer + 1)
    for write, (posted, landed) in zip(push.writes, write_intervals(push), strict=True):
        left, width = 1e3 * (posted - zero), 1e3 * (landed - posted)
        for layer in range(write.layers[0], write.layers[1] + 1):
            axes.barh(layer + 0.22, width, left=left, height=0.4, color=WRITE_COLOUR, edgecolor=WRITE_COLOUR, lw=0.6)
    axes.set_ylim(layers - 0.4, -0.6)
    axes.set_yticks(range(0, layers, max(1, layers // 8)))
    axes.spines[["top", "right"]].set_visible(False)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
