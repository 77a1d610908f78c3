"""Pushes and loads that ranks have ended, as metrics of the engine: each counts once, however many ranks share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from layerpush.telemetry.metrics.catalog import BY_KEY, FALLBACKS, LOADS, PUSHES
from layerpush.telemetry.metrics.recorder import Recorder

KEPT_S = 120.0
"""Seconds for which an end waits for those of other ranks. An aborted request need not have begun on every rank."""
SEVERITY: Mapping[str, tuple[str, ...]] = {
    PUSHES.key: ("layerwise", "whole", "fallback", "late_registration", "cancelled", "unclaimed", "failed"),
    LOADS.key: ("loaded", "unregistered", "aborted", "refused", "failed", "parked"),
}
"""Outcomes by metric, the worst last."""


@dataclass(frozen=True, slots=True)
class Ending:
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

    def joined(self, other: Ending) -> Ending:
        """The same end, with that on other ranks: the worst outcome, the longest of the times that all ranks have."""
        return replace(
            self,
            outcome=max(self.outcome, other.outcome, key=SEVERITY[self.metric].index),
            fallback=self.fallback or other.fallback,
            times={key: max(at, other.times[key]) for key, at in self.times.items() if key in other.times},
            ranks=self.ranks + other.ranks,
        )


class Endings:
    """Joins the ends of ``ranks`` ranks and counts them with ``recorder``. Runs in the scheduler's thread."""

    def __init__(self, ranks: int, recorder: Recorder) -> None:
        self._ranks = ranks
        self._recorder = recorder
        self._open: dict[tuple[str, str], tuple[float, Ending]] = {}

    def reported(self, endings: Iterable[Ending], now: float) -> None:
        """Ranks have reported these ends. ``now`` is in seconds on any one clock."""
        for ending in endings:
            key = ending.metric, ending.request_id
            since, known = self._open.pop(key, (now, None))
            joined = ending if known is None else known.joined(ending)
            if joined.ranks < self._ranks:
                self._open[key] = since, joined
            else:
                self._count(joined)

    def tick(self, now: float) -> None:
        """Count ends for which other ranks have reported none for ``KEPT_S``."""
        for key in [key for key, (since, _) in self._open.items() if now - since >= KEPT_S]:
            self._count(self._open.pop(key)[1])

    def _count(self, ending: Ending) -> None:
        self._recorder.count(BY_KEY[ending.metric], ending.outcome)
        if ending.fallback is not None:
            self._recorder.count(FALLBACKS, ending.fallback)
        self._recorder.observe(*((BY_KEY[key], seconds) for key, seconds in ending.times.items()))
