"""The seconds that a link to one decode engine takes for a WRITE, learned from WRITEs that landed. Pure: no clock.

A WRITE of ``n`` bytes in ``d`` descriptors takes ``write_s + n * byte_s + d * descriptor_s`` seconds on the wire. All
three come from least squares over the WRITEs that have landed; newer ones have more weight. ``slowdown`` is the time of
WRITEs divided by that estimate: the mean over about ten seconds, weighted with the time for which each WRITE had the
link. Other engines that share the link make many WRITEs slow, and may share it again seconds later. One slow WRITE
changes the mean little. But while a WRITE is overdue, its own time counts: so the engine notices a slow link at the
time at which the WRITE should have landed.

WRITEs share the link. A WRITE's own time begins when it is on the wire, or when the WRITE before it has ended, if that
is later. A WRITE ends between two polls of the writer thread, and its end counts as halfway between them. For
``slowdown`` it counts as the first of them: a late poll is no slow link.

``proven_bytes`` bounds the size of a WRITE that relies on the estimate: times of small WRITEs do not predict a large
one's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

KEPT = 0.9
"""Weight of a WRITE, relative to the next one."""
REMEMBERED_S = 10.0
"""The weight of a WRITE in ``slowdown`` falls with this time constant, in seconds."""
MOST_REMEMBERED = 4.0
"""A WRITE that took longer than this many times its estimate counts as one that took this: a link that stood still is
not a slow one.
"""
GROWTH = 4.0
"""A WRITE may be this many times as large as the largest of the recent ones."""
FIRST_TRIAL, TRIAL_EVERY = 8, 64
APART = 0.1
"""``descriptor_s`` is learned only while WRITEs of equal size differ in their descriptors by more than this part."""


class Terms(NamedTuple):
    """Seconds of a WRITE of any size, of a byte and of a descriptor."""

    write_s: float = 0.0
    byte_s: float = 0.0
    descriptor_s: float = 0.0


class _InFlight(NamedTuple):
    size: int
    descriptors: int
    since: float


class LinkSpeed:
    """All times are in seconds, on one monotonic clock. A WRITE in flight has a ``key``. Descriptors are counted as
    NIXL merges them; 0 stands for a number that is not known, on a link where all WRITEs have 0.
    """

    def __init__(self) -> None:
        self._in_flight: OrderedDict[Hashable, _InFlight] = OrderedDict()
        self.last_landed = -math.inf
        self.terms = Terms()
        self._free_since = -math.inf
        self._landed = _Landed()
        self._slow_s = self._used_s = 0.0
        self._largest = 0.0
        self._comparable = 0

    @property
    def is_known(self) -> bool:
        """Whether a WRITE has landed and counts."""
        return self._landed.weight > 0

    @property
    def line(self) -> tuple[float, float]:
        """``(write_s, byte_s)`` of WRITEs with as many descriptors per byte as the recent ones, without slowdown; both
        are 0 if nothing is known.
        """
        write_s, byte_s, descriptor_s = self.terms
        return write_s, byte_s + descriptor_s * self._landed.descriptors_per_byte

    def estimate(self, size: int, descriptors: int) -> float:
        """Seconds of a WRITE on the wire, without slowdown; 0 if nothing is known."""
        write_s, byte_s, descriptor_s = self.terms
        return write_s + size * byte_s + descriptors * descriptor_s

    @property
    def proven_bytes(self) -> float:
        """The size in bytes up to which a WRITE's time may be estimated: ``GROWTH`` times the largest recent one."""
        return GROWTH * self._largest

    def is_trial(self) -> bool:
        """Count a WRITE that may go with many descriptors or with few. Whether it is to go the way that seems slower,
        as a trial: only WRITEs of both ways show ``descriptor_s``.
        """
        self._comparable += 1
        return self._comparable % TRIAL_EVERY == FIRST_TRIAL

    def write_posted(self, key: Hashable, size: int, at: float, descriptors: int = 0) -> None:
        """A WRITE of ``size`` bytes is on the wire from ``at`` on, or will be."""
        self._in_flight[key] = _InFlight(size, descriptors, at)

    def write_posted_at(self, key: Hashable, at: float) -> None:
        """A WRITE whose blocks are copied first is on the wire from ``at`` on, which was expected at another time."""
        flight = self._in_flight.get(key)
        if flight is not None:
            self._in_flight[key] = flight._replace(since=at)

    def write_ended(self, key: Hashable, at: float, *, landed: bool, seen: float = math.inf) -> None:
        """At ``at`` a WRITE was found in D's memory, or failed. ``seen`` is the last time at which it was still in
        flight; without it, the WRITE ended at ``at``.

        The estimate ignores the time of a failed WRITE, and of one that has overtaken another, which shared the link.
        """
        was_oldest = next(iter(self._in_flight), None) == key
        size, descriptors, posted = self._in_flight.pop(key, (0, 0, at))
        if landed and size:
            self.last_landed = at
        if not was_oldest:
            return
        before, since = self._free_since, max(posted, self._free_since)
        still = min(max(since, seen), at)
        self._free_since = 0.5 * (still + at)
        took = self._free_since - since
        if not landed or not size:
            return
        self._largest = max(size, KEPT * self._largest)
        due = self.estimate(size, descriptors)
        if due > 0:
            kept = math.exp((before - self._free_since) / REMEMBERED_S)
            slowdown = min(max(1.0, (still - since) / due), MOST_REMEMBERED)
            self._used_s = kept * self._used_s + slowdown * due
            self._slow_s = kept * self._slow_s + slowdown * slowdown * due
        self._landed.write_landed(size, descriptors, took)
        self.terms = self._landed.fitted(self.terms)

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
        poll = since + 0.5 * due
        while since < poll <= now:
            poll = since + 2 * (poll - since)
        return poll

    @property
    def _oldest(self) -> tuple[float, float]:
        """The oldest WRITE in flight: the time at which it got the link, and its estimated seconds without slowdown."""
        size, descriptors, posted = next(iter(self._in_flight.values()))
        return max(posted, self._free_since), self.estimate(size, descriptors)

    def slowdown(self, now: float) -> float:
        """At least 1: the mean, or the time so far of the oldest WRITE in flight if that is longer."""
        mean = self._slow_s / self._used_s if self._used_s else 1.0
        if not self._in_flight or not self.is_known:
            return mean
        since, due = self._oldest
        return max(mean, (now - since) / due) if due > 0 else mean

    def busy_s(self, now: float, times: float) -> float:
        """Seconds until all WRITEs in flight have landed, if each takes ``times`` as long as estimated."""
        slower = times * self.slowdown(now)
        free = self._free_since
        for size, descriptors, posted in self._in_flight.values():
            free = max(free, posted) + slower * self.estimate(size, descriptors)
        return max(0.0, free - now)


class _Landed:
    """Weighted sums over the WRITEs that have landed: ``n`` bytes, ``d`` descriptors, ``t`` seconds."""

    def __init__(self) -> None:
        self.weight = self._n = self._d = self._t = 0.0
        self._nn = self._nd = self._dd = self._nt = self._dt = 0.0

    @property
    def descriptors_per_byte(self) -> float:
        return self._d / self._n if self._n else 0.0

    def write_landed(self, n: int, d: int, t: float) -> None:
        self.weight = KEPT * self.weight + 1
        self._n, self._d, self._t = KEPT * self._n + n, KEPT * self._d + d, KEPT * self._t + t
        self._nn, self._nd, self._dd = KEPT * self._nn + n * n, KEPT * self._nd + n * d, KEPT * self._dd + d * d
        self._nt, self._dt = KEPT * self._nt + n * t, KEPT * self._dt + d * t

    def fitted(self, before: Terms) -> Terms:
        """The terms that fit best, none of them negative. A term that these WRITEs do not determine stays as it was."""
        n, d, t = self._n / self.weight, self._d / self.weight, self._t / self.weight
        nn, nd, dd = self._nn / self.weight - n * n, self._nd / self.weight - n * d, self._dd / self.weight - d * d
        nt, dt = self._nt / self.weight - n * t, self._dt / self.weight - d * t
        slope = 1 / nn if nn > 1e-9 * n * n else 0.0  # 0: all are of one size
        descriptor_s, apart = before.descriptor_s, dd - nd * nd * slope
        if apart > (APART * d) ** 2:
            descriptor_s = max(0.0, (dt - nd * nt * slope) / apart)
        if d:
            descriptor_s = min(descriptor_s, t / d)
        t, nt = t - descriptor_s * d, nt - descriptor_s * nd
        if not slope:
            write_s = min(before.write_s, t)
            return Terms(write_s, (t - write_s) / n, descriptor_s)
        byte_s = nt * slope
        write_s = t - byte_s * n
        if byte_s > 0 and write_s >= 0:
            return Terms(write_s, byte_s, descriptor_s)
        return Terms(0.0, t / n, descriptor_s)
