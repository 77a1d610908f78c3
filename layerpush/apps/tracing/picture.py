"""The picture of one request: P's computation of each layer, its WRITEs, and D's wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerpush.apps.tracing.breakdown import PARTS, break_down
from layerpush.apps.tracing.intervals import compute_intervals, phases, token_phases
from layerpush.apps.tracing.requests import RequestTrace, shortened
from layerpush.core.push_mode import PushMode
from layerpush.telemetry.trace_records import FirstTokenRecord, LoadRecord, PushRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_RANKS = 8
NAME = 99
"""Characters of a request's id for which the picture has room."""
DPI = 110
COMPUTE_COLOURS = ("#9bb8d3", "#5b87b2")
WRITE_COLOUR = "#d9541e"
LOST_COLOUR = "#8c8c8c"
EXPOSED_COLOUR = "#f6c945"
PHASE_COLOURS = {"register": "#c9c2dc", "await P": "#8f7fb8", "report": "#4b3a78"}
TOKEN_COLOURS = {"schedule": "#a9cfa4", "first step": "#3f7d4a"}
PARKED_COLOUR = "#222222"
LEGEND = {
    "computing the layer (shades alternate by chunk)": COMPUTE_COLOURS[1],
    "WRITE, from post to landed (grey: never landed)": WRITE_COLOUR,
    "exposed: last layer ready to last WRITE landed": EXPOSED_COLOUR,
}


class PictureError(ValueError):
    """The picture cannot be drawn. The text gives the reason."""


def draw_request(request: RequestTrace, path: Path) -> None:
    """One panel for D, with rows for its ranks and its scheduler, and one panel for each rank of P.

    Ranks beyond ``MAX_RANKS`` are left out. The file's ending chooses the format.

    Raises ``PictureError`` without matplotlib, for an ending that it does not know, and for a request without times.
    """
    pushes, loads = request.pushes[:MAX_RANKS], request.loads[:MAX_RANKS]
    rows = len(loads) + len(request.first_tokens)
    heights = [0.5 + 0.35 * rows] * bool(rows) + [3.2] * len(pushes)
    if not heights or not request.begin:
        raise PictureError(f"no time of {request.name} is recorded")
    legend = dict(LEGEND)
    if loads:
        legend |= {f"D: {phase}": colour for phase, colour in PHASE_COLOURS.items()}
    if request.first_tokens:
        legend |= {f"D's scheduler: {phase}": colour for phase, colour in TOKEN_COLOURS.items()}
    if any(load.t_parked for load in loads):
        legend["D: parked blocks"] = PARKED_COLOUR
    with panel_grid(path, heights, 1, legend) as grid:
        panels = [row[0] for row in grid]
        if rows:
            _draw_decode(panels[0], loads, request.first_tokens, request.begin)
        for axes, push in zip(panels[len(panels) - len(pushes) :], pushes, strict=True):
            draw_push(axes, push, request.begin)
            fallback = f", whole because {push.fallback}" if push.fallback else ""
            facts = f"{push.mode}, {len(push.writes)} WRITEs, {push.outcome}{fallback}"
            axes.set_title(f"P: {push.engine_id} rank {push.rank}, {facts}", loc="left", fontsize="medium")
        panels[0].figure.suptitle(_title(request), x=0.01, ha="left", fontsize="medium")
        panels[-1].set_xlabel("milliseconds since the request began")


@contextmanager
def panel_grid(
    path: Path,
    heights: Sequence[float],
    columns: int,
    legend: Mapping[str, str],
    share: Literal["col", "row"] = "col",
    width: float = 15,
) -> Iterator[Any]:
    """A grid of panels, ``grid[row][column]``, with rows of these heights in inches; the file is written at the end.

    The panels of a column, or of a row, ``share`` their time scale. Raises ``PictureError`` without matplotlib, and for
    an ending of the file that it does not know.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.patches import Patch
    except ImportError as error:
        raise PictureError(f"drawing needs matplotlib ({error}): pip install matplotlib") from error
    figure, grid = plt.subplots(
        len(heights),
        columns,
        figsize=(width, sum(heights) + 1.6),
        sharex=share,
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    try:
        yield grid
        handles = [Patch(color=colour, label=label) for label, colour in legend.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
    except ValueError as error:
        raise PictureError(f"{path} cannot be written: {error}") from error
    finally:
        plt.close(figure)


def _title(request: RequestTrace) -> str:
    parts = break_down(request)
    known = [f"{name} {1e3 * part:.1f}" for name in PARTS if (part := parts.parts[name]) is not None]
    facts = f"{request.tokens} tokens, {request.outcome}, {1e3 * parts.total:.1f} ms"
    return f"{shortened(request.name, NAME)}\n{facts}" + (f" ({', '.join(known)})" if known else "")


def _draw_decode(axes: Axes, loads: list[LoadRecord], tokens: list[FirstTokenRecord], zero: float) -> None:
    """A row for each load, and below them a row for each of the scheduler's records. Milliseconds from ``zero``."""
    for row, load in enumerate(loads):
        for name, start, end in phases(load):
            axes.barh(row, 1e3 * (end - start), left=1e3 * (start - zero), height=0.6, color=PHASE_COLOURS[name])
        if load.t_parked is not None:
            width = 1e3 * ((load.t_cleared or load.t_parked) - load.t_parked)
            axes.barh(row + 0.38, width, left=1e3 * (load.t_parked - zero), height=0.12, color=PARKED_COLOUR)
    for row, token in enumerate(tokens, len(loads)):
        for name, start, end in token_phases(token):
            axes.barh(row, 1e3 * (end - start), left=1e3 * (start - zero), height=0.6, color=TOKEN_COLOURS[name])
    labels = [f"rank {load.rank}" for load in loads] + ["scheduler"] * len(tokens)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    engine = loads[0].engine_id if loads else tokens[0].engine_id
    axes.set_title(f"D: {engine}", loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def draw_push(axes: Axes, push: PushRecord, zero: float) -> None:
    """Upper half of a layer's row: computation. Lower half: the WRITEs that carried it. Milliseconds from ``zero``."""
    if push.t_last_ready is not None and push.t_last_landed is not None:
        exposed = [1e3 * (at - zero) for at in (push.t_last_ready, push.t_last_landed)]
        axes.axvspan(*exposed, color=EXPOSED_COLOUR, alpha=0.4)
    rows = 1
    for chunk, layer, start, end in compute_intervals(push):
        left, width = 1e3 * (start - zero), 1e3 * (end - start)
        axes.barh(layer - 0.22, width, left=left, height=0.44, color=COMPUTE_COLOURS[chunk % 2])
        rows = max(rows, layer + 1)
    for write in push.writes:
        first, last = write.layers if push.mode != PushMode.WHOLE else (0, rows - 1)  # a whole WRITE records regions
        rows = max(rows, last + 1)
        end, colour = (write.t_posted, LOST_COLOUR) if write.t_landed is None else (write.t_landed, WRITE_COLOUR)
        left, width = 1e3 * (write.t_post - zero), 1e3 * (end - write.t_post)
        middles = [layer + 0.22 for layer in range(first, last + 1)]
        axes.barh(middles, width, left=left, height=0.4, color=colour, edgecolor=colour, lw=0.6)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_yticks(range(0, rows, max(1, rows // 8)))
    axes.set_ylabel("layer")
    axes.spines[["top", "right"]].set_visible(False)
