"""Requests that heartbeats have named, on their way from the writer thread to the main thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable

KEPT = 1 << 14


class Heartbeats:
    """The main thread takes them in its next step, and an idle engine may not begin one for long. So a request is kept
    once, however often it is named, and at most ``KEPT`` are kept: later ones are named again by the next heartbeat.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: set[str] = set()
        self._announced = False

    def add_requests(self, request_ids: Iterable[str]) -> bool:
        """A heartbeat names requests. True: have the main thread call ``take_requests``. Writer thread."""
        with self._lock:
            for request_id in request_ids:
                if len(self._named) < KEPT:
                    self._named.add(request_id)
            announce = bool(self._named) and not self._announced
            self._announced = self._announced or announce
            return announce

    def take_requests(self) -> set[str]:
        """Remove and return the named requests. Main thread."""
        with self._lock:
            named, self._named, self._announced = self._named, set(), False
        return named
