"""A picture of one request: what D waited for, what P computed, and when the layers were on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerpush.apps.tracing.breakdown import PARTS, break_down
from layerpush.apps.tracing.intervals import compute_intervals
from layerpush.apps.tracing.requests import RequestTrace
from layerpush.telemetry.trace_records import LoadRecord, PushRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_RANKS = 8
COMPUTE_COLOURS = ("#9bb8d3", "#5b87b2")
WRITE_COLOUR = "#d9541e"
LOST_COLOUR = "#8c8c8c"
EXPOSED_COLOUR = "#f6c945"
PHASES = {"register": "#c9c2dc", "await P": "#8f7fb8", "tell the engine": "#4b3a78"}
ASIDE_COLOUR = "#222222"


class PictureError(ValueError):
    """It cannot be drawn. The text says what is missing."""


def draw_request(request: RequestTrace, path: Path) -> None:
    """One panel for D's ranks and one for each of P's, up to ``MAX_RANKS``; the file's ending chooses the format.

    Raises ``PictureError`` without matplotlib, for an ending that it does not know, and for a request without times.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise PictureError(f"drawing needs matplotlib ({error}): pip install matplotlib") from error
    pushes, loads = request.pushes[:MAX_RANKS], request.loads[:MAX_RANKS]
    heights = [0.5 + 0.35 * len(loads)] * bool(loads) + [3.2] * len(pushes)
    if not heights or not request.begin:
        raise PictureError(f"no time of {request.name} is recorded")
    figure, grid = plt.subplots(
        len(heights),
        1,
        figsize=(14, sum(heights) + 1.6),
        sharex=True,
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    try:
        panels = [row[0] for row in grid]
        if loads:
            _draw_loads(panels[0], loads, request.begin)
        for axes, push in zip(panels[len(panels) - len(pushes) :], pushes, strict=True):
            _draw_push(axes, push, request.begin)
        figure.suptitle(_title(request), x=0.01, ha="left")
        panels[-1].set_xlabel("milliseconds since the request began")
        _add_legend(figure, bool(loads), any(load.t_parked for load in loads))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise PictureError(f"{path} cannot be written: {error}") from error
    finally:
        plt.close(figure)


def _title(request: RequestTrace) -> str:
    parts = break_down(request)
    known = [f"{name} {1e3 * part:.1f}" for name in PARTS if (part := parts.parts[name]) is not None]
    text = f"{request.name}: {request.tokens} tokens, {request.outcome}, {1e3 * parts.total:.1f} ms"
    return f"{text} ({', '.join(known)})" if known else text


def _draw_loads(axes: Axes, loads: list[LoadRecord], zero: float) -> None:
    for row, load in enumerate(loads):
        marks = (load.t_awaited, load.t_registered, load.t_settled, load.t_reported)
        for (_, colour), start, end in zip(PHASES.items(), marks[:-1], marks[1:], strict=True):
            if start is not None and end is not None:
                axes.barh(row, 1e3 * (end - start), left=1e3 * (start - zero), height=0.6, color=colour)
        if load.t_parked is not None:
            end = load.t_cleared or load.t_parked
            width = 1e3 * (end - load.t_parked)
            axes.barh(row + 0.38, width, left=1e3 * (load.t_parked - zero), height=0.12, color=ASIDE_COLOUR)
    axes.set_yticks(range(len(loads)), [f"rank {load.rank}" for load in loads])
    axes.set_ylim(len(loads) - 0.4, -0.6)
    axes.set_title(f"D: {loads[0].engine_id}", loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_push(axes: Axes, push: PushRecord, zero: float) -> None:
    """Upper half of a layer's row: computation. Lower half: the WRITEs that carried it."""
    if push.t_last_ready is not None and push.t_last_landed is not None:
        axes.axvspan(
            1e3 * (push.t_last_ready - zero), 1e3 * (push.t_last_landed - zero), color=EXPOSED_COLOUR, alpha=0.4
        )
    rows = 1
    for chunk, layer, start, end in compute_intervals(push):
        left, width = 1e3 * (start - zero), 1e3 * (end - start)
        axes.barh(layer - 0.22, width, left=left, height=0.44, color=COMPUTE_COLOURS[chunk % 2])
        rows = max(rows, layer + 1)
    for write in push.writes:
        first, last = write.layers if push.mode != "request" else (0, rows - 1)  # its regions are no layers
        rows = max(rows, last + 1)
        end, colour = (write.t_posted, LOST_COLOUR) if write.t_landed is None else (write.t_landed, WRITE_COLOUR)
        left, width = 1e3 * (write.t_post - zero), 1e3 * (end - write.t_post)
        layers = range(first, last + 1)
        axes.barh(
            [layer + 0.22 for layer in layers], width, left=left, height=0.4, color=colour, edgecolor=colour, lw=0.6
        )
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_yticks(range(0, rows, max(1, rows // 8)))
    axes.set_ylabel("layer")
    fallback = f", whole because {push.fallback}" if push.fallback else ""
    what = f"P: {push.engine_id} rank {push.rank}, {push.mode}, {len(push.writes)} WRITEs, {push.outcome}{fallback}"
    axes.set_title(what, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Any, with_loads: bool, with_parked: bool) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=COMPUTE_COLOURS[1], label="computing the layer (shades alternate by chunk)"),
        Patch(color=WRITE_COLOUR, label="WRITE, from post to landed (grey: never landed)"),
        Patch(color=EXPOSED_COLOUR, label="exposed: last layer ready to last WRITE landed"),
    ]
    if with_loads:
        handles += [Patch(color=colour, label=f"D: {phase}") for phase, colour in PHASES.items()]
    if with_parked:
        handles.append(Patch(color=ASIDE_COLOUR, label="D: blocks set aside"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
