"""How long a loop's queues may have waited for it."""

from __future__ import annotations

import threading


class Lag:
    """The loop's own thread calls ``began`` and ``ended`` around each turn; any thread may ``take``. Times in seconds.

    A turn's lag is its own length, and by how much the wait before it overslept: a loop that is woken in time and does
    little has none. A turn that does not end counts with what it has taken so far.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worst = 0.0
        self._due: float | None = None
        self._overslept = 0.0
        self._began: float | None = None

    def began(self, now: float) -> None:
        with self._lock:
            self._overslept = 0.0 if self._due is None else max(0.0, now - self._due)
            self._began = now

    def ended(self, now: float, patience: float) -> None:
        """The loop will wait for ``patience`` seconds, unless it is woken."""
        with self._lock:
            if self._began is not None:
                self._worst = max(self._worst, self._overslept + now - self._began)
            self._began, self._due = None, now + patience

    def take(self, now: float) -> float | None:
        """The worst since the last call; None if there was no turn."""
        with self._lock:
            if self._due is None and self._began is None:
                return None
            worst, self._worst = self._worst, 0.0
            running = 0.0 if self._began is None else self._overslept + now - self._began
            return max(worst, running)
