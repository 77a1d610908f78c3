"""How long a loop's queues may have waited for it."""

from __future__ import annotations

import threading


class Lag:
    """The loop's own thread calls ``began`` and ``ended`` around each turn; any thread may ``take``. Times in seconds.

    A turn's lag is its own length, and how much later it began than it was woken, or than it was to wake up: a loop
    that comes in time and does little has none. What does not end counts with what it has taken so far, be it a turn
    or the wait for one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worst = 0.0
        self._due: float | None = None
        self._woken: float | None = None
        self._began: float | None = None
        self._late = 0.0

    def woken(self, now: float) -> None:
        """There is work; the first to say so since the last turn began counts. Any thread, without a lock."""
        if self._woken is None:
            self._woken = now

    def began(self, now: float) -> None:
        with self._lock:
            self._late = self._lateness(now)
            self._began, self._woken = now, None

    def ended(self, now: float, poll_timeout: float) -> None:
        """The loop now waits for ``poll_timeout`` seconds, unless it is woken."""
        with self._lock:
            if self._began is not None:
                self._worst = max(self._worst, self._late + now - self._began)
            self._began, self._due = None, now + poll_timeout

    def take(self, now: float) -> float | None:
        """The worst since the last call; None if there was no turn."""
        with self._lock:
            if self._due is None and self._began is None:
                return None
            worst, self._worst = self._worst, 0.0
            so_far = self._lateness(now) if self._began is None else self._late + now - self._began
            return max(worst, so_far)

    def _lateness(self, now: float) -> float:
        moments = [moment for moment in (self._due, self._woken) if moment is not None]
        return max(0.0, now - min(moments, default=now))
