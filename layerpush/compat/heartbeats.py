"""Requests that heartbeats have named, on their way from the writer thread to the main thread."""

from __future__ import annotations

from collections.abc import Iterable

KEPT = 1 << 14


class Heartbeats:
    """The main thread takes them in its next step, and an idle engine may not begin one for long. So a request is kept
    once, however often it is named, and at most ``KEPT`` are kept: later ones are named again by the next heartbeat.
    """

    def __init__(self) -> None:
        self._named: dict[str, None] = {}
        self._announced = False

    def add_requests(self, request_ids: Iterable[str]) -> bool:
        """A heartbeat names requests. True: have the main thread call ``take_requests``. Writer thread."""
        for request_id in request_ids:
            if len(self._named) < KEPT:
                self._named[request_id] = None
        announce = bool(self._named) and not self._announced
        self._announced = self._announced or announce
        return announce

    def take_requests(self) -> set[str]:
        """Remove and return the named requests. Main thread."""
        self._announced = False  # first: a request that is named from now on is announced again, or is taken below
        named = set()
        while self._named:
            named.add(self._named.popitem()[0])
        return named
