"""Takes metrics from the writer thread to the engine's main thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from layerpush.telemetry.metrics.catalog import LOADS, NO_LABEL, PUSHES, Metric
from layerpush.telemetry.metrics.metric_delta import MetricDelta

SEVERITY: Mapping[str, tuple[str, ...]] = {
    PUSHES.key: ("layerwise", "whole", "fallback", "late_registration", "cancelled", "unclaimed", "failed"),
    LOADS.key: ("loaded", "unregistered", "aborted", "refused", "failed", "parked"),
}
"""Outcomes by metric, the worst last."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a push or load on one rank or on several.

    ``metric`` is the key of ``PUSHES`` or ``LOADS``, ``outcome`` a value of its label, ``fallback`` one of
    ``FALLBACKS``. ``times`` are seconds by a histogram's key.
    """

    request_id: str
    metric: str
    outcome: str
    fallback: str | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    ranks: int = 1

    def joined(self, other: Ended) -> Ended:
        """The same end, with that on other ranks: the worst outcome, the longest of the times that all ranks have."""
        return replace(
            self,
            outcome=max(self.outcome, other.outcome, key=SEVERITY[self.metric].index),
            fallback=self.fallback or other.fallback,
            times={key: max(at, other.times[key]) for key, at in self.times.items() if key in other.times},
            ranks=self.ranks + other.ranks,
        )


class Recorder:
    """Any thread. The lock is held for a few dict operations only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tally = MetricDelta()
        self._ended: list[Ended] = []

    def count(self, metric: Metric, value: str = NO_LABEL, number: int = 1) -> None:
        with self._lock:
            self._tally.count(metric, value, number)

    def observe(self, *observations: tuple[Metric, float]) -> None:
        with self._lock:
            for metric, value in observations:
                self._tally.observe(metric, value)

    def record_ended(self, ended: Ended) -> None:
        """This rank has ended a push or load."""
        with self._lock:
            self._ended.append(ended)

    def take_ended(self) -> list[Ended]:
        """Take the ends recorded since the last call."""
        with self._lock:
            taken, self._ended = self._ended, []
        return taken

    def take_delta(self) -> MetricDelta:
        """The metrics recorded since the last call, in a delta that belongs to the caller."""
        with self._lock:
            taken, self._tally = self._tally, MetricDelta()
        return taken
