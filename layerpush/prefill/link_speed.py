"""The seconds that a link to one decode engine takes for a WRITE, learned from WRITEs that landed. Pure: no clock.

A WRITE of ``n`` bytes takes ``write_s + n * byte_s`` seconds. Both come from a least-squares line through the WRITEs
that have landed; newer ones have more weight. ``slowdown`` is the time of recent WRITEs divided by the time on the
line. It rises with one slow WRITE and falls slowly. An overdue WRITE raises it before it lands: so the engine notices a
slow link at the time at which the WRITE should have landed.

WRITEs share the link. A WRITE's own time begins when it is posted, or when the WRITE before it has ended, if that is
later. It includes the copies of a WRITE that goes through staging memory. A WRITE ends between two polls of the
writer thread, and its end counts as halfway between them.

``proven_bytes`` bounds the size of a WRITE that relies on the line: times of small WRITEs do not predict a large one's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

KEPT = 0.9
"""Weight of a WRITE, relative to the next one."""
RECOVERED = 0.2
"""A faster WRITE lowers ``slowdown`` by this part of the difference."""
GROWTH = 4.0
"""A WRITE may be this many times as large as the largest of the recent ones."""


class LinkSpeed:
    """All times are in seconds, on one monotonic clock. A WRITE in flight has a ``key``."""

    def __init__(self) -> None:
        self._in_flight: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        self.last_landed = -math.inf
        self._free_since = -math.inf
        self._weight = self._bytes = self._squares = self._seconds = self._products = 0.0
        self._line = (0.0, 0.0)
        self._slowdown = 1.0
        self._largest = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a WRITE has landed and counts."""
        return self._weight > 0

    @property
    def line(self) -> tuple[float, float]:
        """``(write_s, byte_s)`` without slowdown; both are 0 if nothing is known."""
        return self._line

    @property
    def proven_bytes(self) -> float:
        """The size in bytes up to which a WRITE's time may be estimated: ``GROWTH`` times the largest recent one."""
        return GROWTH * self._largest

    def posted(self, key: Hashable, size: int, at: float) -> None:
        """A WRITE of ``size`` bytes is on the wire."""
        self._in_flight[key] = (size, at)

    def ended(self, key: Hashable, at: float, *, landed: bool, seen: float = math.inf) -> None:
        """At ``at`` a WRITE was found in D's memory, or failed. ``seen`` is the last time at which it was still in
        flight; without it, the WRITE ended at ``at``.

        The estimate ignores the time of a failed WRITE, and of one that has overtaken another, which shared the link.
        """
        was_oldest = next(iter(self._in_flight), None) == key
        size, posted = self._in_flight.pop(key, (0, at))
        if landed and size:
            self.last_landed = at
        if not was_oldest:
            return
        since = max(posted, self._free_since)
        self._free_since = 0.5 * (min(max(since, seen), at) + at)
        took = self._free_since - since
        if not landed or not size:
            return
        self._largest = max(size, KEPT * self._largest)
        write_s, byte_s = self.line
        due = write_s + size * byte_s
        if due > 0:
            measured, known = max(1.0, took / due), self._slowdown
            self._slowdown = measured if measured > known else known + RECOVERED * (measured - known)
        self._weight = KEPT * self._weight + 1
        self._bytes = KEPT * self._bytes + size
        self._squares = KEPT * self._squares + size * size
        self._seconds = KEPT * self._seconds + took
        self._products = KEPT * self._products + took * size
        self._line = self._fitted()

    def _fitted(self) -> tuple[float, float]:
        """The line through the recent WRITEs. If all are of one size, ``write_s`` stays as it was."""
        mean_s, mean_bytes = self._seconds / self._weight, self._bytes / self._weight
        spread = self._squares / self._weight - mean_bytes**2
        if spread <= 1e-9 * mean_bytes**2:
            write_s = min(self._line[0], mean_s)
            return write_s, (mean_s - write_s) / mean_bytes
        byte_s = (self._products / self._weight - mean_bytes * mean_s) / spread
        write_s = mean_s - byte_s * mean_bytes
        return (write_s, byte_s) if byte_s > 0 and write_s >= 0 else (0.0, mean_s / mean_bytes)

    def next_poll(self, now: float, *, halfway: bool = False) -> float:
        """The time of the next poll of the oldest WRITE in flight: at half of its estimated time, at all of it, and so
        on, each poll twice as late as the one before. So its measured time is 0.75 to 1.5 times its real one. Infinite
        if no WRITE is in flight, or if nothing is known.

        ``halfway``: before its estimated landing, halfway from now to that.
        """
        if not self._in_flight or not self.is_known:
            return math.inf
        since, due = self._oldest
        if halfway and since + due > now:
            return 0.5 * (now + since + due)
        look = since + 0.5 * due
        while since < look <= now:
            look = since + 2 * (look - since)
        return look

    @property
    def _oldest(self) -> tuple[float, float]:
        """The oldest WRITE in flight: the time at which it got the link, and its estimated seconds without slowdown."""
        size, posted = next(iter(self._in_flight.values()))
        write_s, byte_s = self.line
        return max(posted, self._free_since), write_s + size * byte_s

    def slowdown(self, now: float) -> float:
        """At least 1. The oldest WRITE in flight counts with its time so far."""
        if not self._in_flight or not self.is_known:
            return self._slowdown
        since, due = self._oldest
        return max(self._slowdown, (now - since) / due) if due > 0 else self._slowdown

    def busy_s(self, now: float, times: float) -> float:
        """Seconds until all WRITEs in flight have landed, if each takes ``times`` as long as estimated."""
        slower, (write_s, byte_s) = times * self.slowdown(now), self.line
        free = self._free_since
        for size, posted in self._in_flight.values():
            free = max(free, posted) + slower * (write_s + size * byte_s)
        return max(0.0, free - now)
