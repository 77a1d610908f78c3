"""The requests that have come to a prefill engine, as one of its workers knows them. Pure; one thread.

The scheduler names a request in the first step after it came, although the request may wait in the queue for a long
time. So a worker can distinguish a request that waits from one that never came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

KEPT = 1 << 16
IDLE_S = 1.0
"""Seconds without a step after which an engine is idle. An idle engine begins a step for every request that comes."""


class Arrivals:
    """``base_id`` strips the suffix that an engine adds to the id its router gave. Times are the caller's clock."""

    def __init__(self, base_id: Callable[[str], str]) -> None:
        self._base = base_id
        self._requests: dict[str, str | None] = {}
        self._bases: dict[str, set[str]] = {}
        self._transfers: dict[str, set[str]] = {}
        """The requests of each base id, and of each ``transfer_id``."""
        self._begun = 0
        self._last_two: deque[float] = deque((float("-inf"),) * 2, maxlen=2)
        self._idle_since = float("inf")

    def came(self, requests: Mapping[str, str | None]) -> None:
        """The scheduler has these requests: the ``transfer_id`` of each, by request id."""
        for request_id, transfer in requests.items():
            self.ended(request_id)
            if len(self._requests) >= KEPT:
                self.ended(next(iter(self._requests)))
            self._requests[request_id] = transfer
            self._bases.setdefault(self._base(request_id), set()).add(request_id)
            if transfer is not None:
                self._transfers.setdefault(transfer, set()).add(request_id)

    def ended(self, request_id: str) -> None:
        """A request is over."""
        if request_id in self._requests:
            transfer = self._requests.pop(request_id)
            _remove(self._bases, self._base(request_id), request_id)
            if transfer is not None:
                _remove(self._transfers, transfer, request_id)

    @property
    def requests(self) -> list[str]:
        """The requests that are here, in the order in which they came."""
        return list(self._requests)

    def transfer_of(self, request_id: str) -> str | None:
        """The ``transfer_id`` of a request, if it is here and has one."""
        return self._requests.get(request_id)

    def named(self, bases: Iterable[str], transfer: str | None) -> set[str]:
        """The requests that are here and have one of these base ids or this ``transfer_id``."""
        found = set() if transfer is None else set(self._transfers.get(transfer, ()))
        return found.union(*(self._bases.get(base, ()) for base in bases))

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


def _remove(index: dict[str, set[str]], key: str, request_id: str) -> None:
    index[key].discard(request_id)
    if not index[key]:
        del index[key]
