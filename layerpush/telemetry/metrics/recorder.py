"""Takes metrics from the writer thread to the engine's main thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from layerpush.telemetry.metrics.catalog import NO_LABEL, Metric
from layerpush.telemetry.metrics.tally import Tally

if TYPE_CHECKING:
    from layerpush.telemetry.metrics.endings import Ending


class Recorder:
    """Any thread. The lock is held for a few dict operations only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tally = Tally()
        self._endings: list[Ending] = []

    def count(self, metric: Metric, value: str = NO_LABEL, number: int = 1) -> None:
        with self._lock:
            self._tally.count(metric, value, number)

    def observe(self, *observations: tuple[Metric, float]) -> None:
        with self._lock:
            for metric, value in observations:
                self._tally.observe(metric, value)

    def ended(self, ending: Ending) -> None:
        """This rank has ended a push or load."""
        with self._lock:
            self._endings.append(ending)

    def endings(self) -> list[Ending]:
        """Take the ends recorded since the last call."""
        with self._lock:
            taken, self._endings = self._endings, []
        return taken

    def take(self) -> Tally:
        """The metrics recorded since the last call, in a tally that belongs to the caller."""
        with self._lock:
            taken, self._tally = self._tally, Tally()
        return taken
