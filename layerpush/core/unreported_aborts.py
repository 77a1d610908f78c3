"""Endings of which the engine has not been told what became of them. Time is the caller's clock."""

from __future__ import annotations

SETTLE_S = 1.0
"""How long an engine without requests goes on stepping to hear of them."""
NEXT_REPORT_S = 0.1
"""After so long without another report that says so, its workers need no more steps."""


class UnreportedAborts:
    """The engine drops a request, may have nothing else to do, and would hear how its push ended at its next request.

    The main thread calls ``dropped`` and asks ``is_pending``; the writer thread takes ``count`` before a turn and
    hands it to ``settled`` when nothing that had been dropped by then is left.
    """

    def __init__(self) -> None:
        self.count = 0
        self._settled = 0
        self._until = 0.0

    def dropped(self, now: float) -> None:
        self.count += 1
        self._until = now + SETTLE_S

    def settled(self, count: int) -> None:
        self._settled = count

    def is_pending(self, now: float) -> bool:
        return self._settled < self.count and now < self._until
