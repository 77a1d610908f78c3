"""Times at which something is due, by key. Pure."""

from __future__ import annotations

import heapq


class Deadlines:
    """Keys with a time each. To find the keys that are due takes no longer if there are many others."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._soonest: list[tuple[float, str]] = []
        """A heap. It also has times that were replaced, until they pass."""

    def set(self, key: str, at: float | None) -> None:
        """Something is due for this key at this time, and not before; None: nothing is."""
        if at is None:
            self._at.pop(key, None)
        elif self._at.get(key) != at:
            self._at[key] = at
            heapq.heappush(self._soonest, (at, key))

    @property
    def soonest(self) -> float | None:
        """The first of the times; None if there is none."""
        while self._soonest and self._at.get(self._soonest[0][1]) != self._soonest[0][0]:
            heapq.heappop(self._soonest)
        return self._soonest[0][0] if self._soonest else None

    def due(self, now: float) -> list[str]:
        """Take the keys whose time has come, the earliest first."""
        keys = []
        while self._soonest and self._soonest[0][0] <= now:
            at, key = heapq.heappop(self._soonest)
            if self._at.get(key) == at:
                del self._at[key]
                keys.append(key)
        return keys
