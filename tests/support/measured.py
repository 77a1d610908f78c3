"""The metrics of an engine with one rank."""

from __future__ import annotations

from layerpush.telemetry.metrics.ended_counts import EndedCounts
from layerpush.telemetry.metrics.metric_delta import MetricDelta
from layerpush.telemetry.metrics.recorder import Recorder


def measured(recorder: Recorder) -> MetricDelta:
    """Take the rank's metrics, with the ends of its pushes and loads, as its scheduler counts them."""
    endings = EndedCounts(1, recorder)
    for ending in recorder.take_ended():
        endings.report_ended(ending, 0.0)
    return recorder.take_delta()
