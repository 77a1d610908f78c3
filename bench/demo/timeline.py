"""The demo's picture: one push of each mode side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.figures import completed_times
from layerpush.apps.tracing.picture import LEGEND, draw_push, panel_grid
from layerpush.telemetry.trace_records import PushRecord

LATE_LAYERS = 3
"""The enlarged end of a push shows at least so many layers."""


def draw_pushes(pushes: Mapping[str, PushRecord], path: Path) -> None:
    """One column of panels per name: above, the end of prefill, enlarged; below, the whole push.

    The panels of a row share their time scale. Its zero is the time when the last layer was ready.

    Raises ``TraceError`` when a push was not completed, ``PictureError`` as ``draw_request`` does.
    """
    times = {name: completed_times(push) for name, push in pushes.items()}
    longest = 1e3 * max(ready - planned for planned, ready, _ in times.values())
    exposed = 1e3 * max(landed - ready for _, ready, landed in times.values())
    with panel_grid(path, [4.4, 2.6], len(pushes), LEGEND, share="row") as (ends, wholes):
        for end, whole, (name, push) in zip(ends, wholes, pushes.items(), strict=True):
            _, ready, landed = times[name]
            for axes in (end, whole):
                draw_push(axes, push, zero=ready)
                axes.set_xlabel("milliseconds since the last layer was ready")
            end.set_title(f"{name}: {1e3 * (landed - ready):.1f} ms exposed", loc="left")
            counts = ((len(push.chunks), "chunk"), (len(push.writes), "WRITE"))
            counted = ", ".join(f"{number} {noun}{'s' * (number != 1)}" for number, noun in counts)
            whole.set_title(f"the whole push: {counted}", loc="left", fontsize="medium")
        before = max(1e3 * (times[name][1] - _late(push)) for name, push in pushes.items())
        ends[0].set_xlim(-max(before, exposed), exposed * 1.05)
        wholes[0].set_xlim(-longest * 1.01, exposed * 1.05)


def _late(push: PushRecord) -> float:
    """The time in seconds at which all but the last ``LATE_LAYERS`` layers were ready."""
    return min(sorted(at for _, _, at, _ in push.ready)[-LATE_LAYERS - 1 :])
