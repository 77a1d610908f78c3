"""The metrics of one process: those that it recorded, and those that it reads for each report."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layerpush.telemetry.metrics.catalog import WRITER_LAG, Metric
from layerpush.telemetry.metrics.loop_lag import LoopLag
from layerpush.telemetry.metrics.metric_delta import MetricDelta
from layerpush.telemetry.metrics.recorder import Recorder

REPORT_S = 1.0
"""Seconds between two reports while no event occurs. Such a report has gauges and lag only, and needs a step."""


class Reporter:
    """``name`` is unique among the engine's processes. ``recorder`` and ``lag`` are for the writer thread.

    Call ``level`` and ``total`` before the first ``take_delta``. Its thread calls their ``read`` functions, which must
    change nothing.
    """

    def __init__(self, name: str) -> None:
        self.recorder = Recorder()
        self.lag = LoopLag()
        self._name = name
        self._levels: list[tuple[Metric, Callable[[], float]]] = []
        self._totals: list[tuple[Metric, Callable[[], Mapping[str, int]]]] = []
        self._reported_levels: dict[str, float] = {}
        self._reported_totals: dict[tuple[str, str], int] = {}
        self._next_report_at = float("-inf")

    def level(self, metric: Metric, read: Callable[[], float]) -> None:
        """Report this gauge. ``read`` returns its level."""
        self._levels.append((metric, read))

    def total(self, metric: Metric, read: Callable[[], Mapping[str, int]]) -> None:
        """Report this counter. ``read`` returns running totals by label value; a report has their increase."""
        self._totals.append((metric, read))

    def take_delta(self, now: float) -> MetricDelta | None:
        """The metrics since the last call, with all gauges; None if nothing is new and the last report is recent.

        ``now`` is in seconds on the clock of ``lag``. One thread.
        """
        delta = self.recorder.take_delta()
        for metric, totals in self._totals:
            for value, total in totals().items():
                delta.count(metric, value, total - self._reported_totals.get((metric.key, value), 0))
                self._reported_totals[metric.key, value] = total
        levels = {metric.key: (metric, float(read())) for metric, read in self._levels}
        changed = any(self._reported_levels.get(key, 0.0) != level for key, (_, level) in levels.items())
        if delta.is_empty and not changed and now < self._next_report_at:
            return None
        lag = self.lag.take_worst(now)
        if lag is not None:
            delta.observe(WRITER_LAG, lag)
        for key, (metric, level) in levels.items():
            delta.level(metric, self._name, level)
            self._reported_levels[key] = level
        self._next_report_at = now + REPORT_S
        return None if delta.is_empty else delta
