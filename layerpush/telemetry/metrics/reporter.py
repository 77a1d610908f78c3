"""One process's share of the metrics: what it has recorded, and what is read when a report is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layerpush.telemetry.metrics.catalog import WRITER_LAG, Metric
from layerpush.telemetry.metrics.lag import Lag
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.metrics.tally import Tally

REPORT_S = 1.0
"""How often there is a report of levels and lag although nothing has happened, if the engine steps."""


class Reporter:
    """``name`` tells this process from the engine's others. ``recorder`` and ``lag`` are for the writer thread.

    ``level`` and ``total`` come before the first ``take``. What they are given is called on the thread that calls
    ``take``, and must only look.
    """

    def __init__(self, name: str) -> None:
        self.recorder = Recorder()
        self.lag = Lag()
        self._name = name
        self._levels: list[tuple[Metric, Callable[[], float]]] = []
        self._totals: list[tuple[Metric, Callable[[], Mapping[str, int]]]] = []
        self._told: dict[str, float] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._next = float("-inf")

    def level(self, metric: Metric, read: Callable[[], float]) -> None:
        """A gauge, read for every report."""
        self._levels.append((metric, read))

    def total(self, metric: Metric, read: Callable[[], Mapping[str, int]]) -> None:
        """A counter that others add up: running totals by label value; what came on top is reported."""
        self._totals.append((metric, read))

    def take(self, now: float) -> Tally | None:
        """What is new since the last call, with all levels; None if nothing is and the last report is recent.

        ``now`` in seconds, on the clock of ``lag``. One thread.
        """
        tally = self.recorder.take()
        for metric, totals in self._totals:
            for value, total in totals().items():
                tally.count(metric, value, total - self._seen.get((metric.key, value), 0))
                self._seen[metric.key, value] = total
        levels = {metric.key: (metric, float(read())) for metric, read in self._levels}
        changed = any(self._told.get(key, 0.0) != level for key, (_, level) in levels.items())
        if tally.is_empty and not changed and now < self._next:
            return None
        lag = self.lag.take(now)
        if lag is not None:
            tally.observe(WRITER_LAG, lag)
        for key, (metric, level) in levels.items():
            tally.level(metric, self._name, level)
            self._told[key] = level
        self._next = now + REPORT_S
        return None if tally.is_empty else tally
