"""Actions for a later time. Pure: the time is an argument."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Schedule:
    """Actions in order of time. Those of the same time run in the order of ``put``."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, at: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._entries, (at, next(self._count), action))

    def run_due(self, now: float) -> None:
        while self._entries and self._entries[0][0] <= now:
            heapq.heappop(self._entries)[2]()
