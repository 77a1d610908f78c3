"""Pushes and loads that ranks have ended, as metrics of the engine: each counts once, however many ranks share it."""

from __future__ import annotations

from layerpush.telemetry.metrics.catalog import BY_KEY, FALLBACKS
from layerpush.telemetry.metrics.recorder import Ended, Recorder

KEPT_S = 120.0
"""Seconds for which an end waits for those of other ranks. An aborted request need not have begun on every rank."""


class EndedCounts:
    """Joins the ends of ``ranks`` ranks and counts them with ``recorder``. Runs in the scheduler's thread."""

    def __init__(self, ranks: int, recorder: Recorder) -> None:
        self._ranks = ranks
        self._recorder = recorder
        self._open: dict[tuple[str, str], tuple[float, Ended]] = {}

    def report_ended(self, ended: Ended, now: float) -> None:
        """A rank has reported this end. ``now`` is in seconds on any one clock."""
        key = ended.metric, ended.request_id
        since, known = self._open.pop(key, (now, None))
        joined = ended if known is None else known.joined(ended)
        if joined.ranks < self._ranks:
            self._open[key] = since, joined
        else:
            self._count(joined)

    def tick(self, now: float) -> None:
        """Count ends for which other ranks have reported none for ``KEPT_S``."""
        for key in [key for key, (since, _) in self._open.items() if now - since >= KEPT_S]:
            self._count(self._open.pop(key)[1])

    def _count(self, ended: Ended) -> None:
        self._recorder.count(BY_KEY[ended.metric], ended.outcome)
        if ended.fallback is not None:
            self._recorder.count(FALLBACKS, ended.fallback)
        self._recorder.observe(*((BY_KEY[key], seconds) for key, seconds in ended.times.items()))
