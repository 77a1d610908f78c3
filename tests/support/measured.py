"""The metrics of an engine with one rank."""

from __future__ import annotations

from layerpush.telemetry.metrics.endings import Endings
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.metrics.tally import Tally


def measured(recorder: Recorder) -> Tally:
    """Take the rank's metrics, with the ends of its pushes and loads, as its scheduler counts them."""
    endings = Endings(1, recorder)
    for ending in recorder.endings():
        endings.reported(ending, 0.0)
    return recorder.take()
