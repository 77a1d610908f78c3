"""Measures the lag of a loop: the longest time that its queues may have waited."""

from __future__ import annotations

import threading


class LoopLag:
    """The loop's own thread calls ``turn_began`` and ``turn_ended`` around each turn, any thread ``take_worst``. Times
    are in seconds.

    A turn's lag is its length plus its delay. The delay is the time from the wake-up call, or from the end of the poll
    timeout if that is earlier, until the turn begins. A loop that is on time and does little has almost no lag. A turn
    or a delay that still lasts counts with its length so far.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worst = 0.0
        self._due: float | None = None
        self._woken: float | None = None
        self._began: float | None = None
        self._delayed = 0.0

    def woken(self, now: float) -> None:
        """There is work. The first call since the last turn began counts. Any thread, without a lock."""
        if self._woken is None:
            self._woken = now

    def turn_began(self, now: float) -> None:
        with self._lock:
            self._delayed = self._delay(now)
            self._began, self._woken = now, None

    def turn_ended(self, now: float, poll_timeout: float) -> None:
        """The loop now waits for ``poll_timeout`` seconds, unless it is woken."""
        with self._lock:
            if self._began is not None:
                self._worst = max(self._worst, self._delayed + now - self._began)
            self._began, self._due = None, now + poll_timeout

    def take_worst(self, now: float) -> float | None:
        """The longest lag since the last call; None if there has been no turn yet."""
        with self._lock:
            if self._due is None and self._began is None:
                return None
            worst, self._worst = self._worst, 0.0
            so_far = self._delay(now) if self._began is None else self._delayed + now - self._began
            return max(worst, so_far)

    def _delay(self, now: float) -> float:
        moments = [moment for moment in (self._due, self._woken) if moment is not None]
        return max(0.0, now - min(moments, default=now))
