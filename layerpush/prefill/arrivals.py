"""The requests that have come to a prefill engine, as one of its workers knows them. Pure; one thread.

The scheduler names a request in the first step after it came, although the request may wait in the queue for a long
time. So a worker can distinguish a request that waits from one that never came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from layerpush.core.request_index import Arrived, RequestIndex

KEPT = 1 << 16
KEPT_BYTES = 128 << 20
IDLE_S = 1.0
"""Seconds without a step after which an engine is idle. An idle engine begins a step for every request that comes."""


class Arrivals(RequestIndex):
    """``base_id`` strips the suffix that an engine adds to the id its router gave. Times are the caller's clock."""

    def __init__(self, base_id: Callable[[str], str]) -> None:
        super().__init__(base_id, KEPT, KEPT_BYTES)
        self._begun = 0
        self._last_two: deque[float] = deque((float("-inf"),) * 2, maxlen=2)
        self._idle_since = float("inf")

    def came(self, requests: Iterable[Arrived]) -> None:
        """The scheduler has these requests."""
        for request in requests:
            self.add(request)

    def look(self, begun: int, running: bool, now: float) -> None:
        """Note the number of steps that have begun, and whether the last one runs. Call it often, after ``came``."""
        for _ in range(min(begun - self._begun, 2)):
            self._last_two.append(now)
        if running or begun != self._begun:
            self._idle_since = float("inf")
        elif self._idle_since == float("inf"):
            self._idle_since = now
        self._begun = begun

    def is_complete(self, since: float, now: float) -> bool:
        """Whether every request that had come to the engine at the time ``since`` has been noted.

        A step names the requests that came before it was scheduled, and the next step may be scheduled already. So two
        steps must have begun after ``since``, or the engine must be idle.
        """
        return now >= self._idle_since + IDLE_S or self._last_two[0] > since
