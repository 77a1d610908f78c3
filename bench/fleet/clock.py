"""One clock for everything: simulated seconds, and the calls that are due."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from unittest.mock import patch

Call = Callable[[], object]


class Clock:
    """Calls that are due at the same time are made in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 1.0
        self._calls: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Call) -> None:
        """Make a call in so many simulated seconds."""
        heapq.heappush(self._calls, (self.now + seconds, next(self._numbers), call))

    def run(self, until: float) -> None:
        """Make all calls that are due before ``until``, and set the clock to that. The product reads ``perf_counter``:
        it gets the simulated time.
        """
        with patch("time.perf_counter", self.time), patch("layerpush.prefill.step_events.perf_counter", self.time):
            while self._calls and self._calls[0][0] < until:
                self.now, _, call = heapq.heappop(self._calls)
                call()
        self.now = until

    def time(self) -> float:
        return self.now
