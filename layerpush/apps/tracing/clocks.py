"""Estimates the differences between the clocks of several hosts. Pure.

``time.perf_counter()`` has another zero on each host, so P's times can be compared with D's only if the difference of
their clocks is known. There are three sources; the first that is available counts:

- *handshake*: P's side channel answers a request of D with P's clock. vLLM on D takes the middle of the round trip as
  the moment of the answer. D's records have the difference.
- *messages*: P cannot receive a registration before D sent it, and D cannot receive a completion before P's last WRITE
  has landed. So each request with records of both sides bounds the difference from above and from below.
- *wall clocks*: each file begins with readings of both clocks at one moment. They are as good as the hosts' NTP.

If a difference by handshake or wall clocks lies outside the bounds of the messages, the nearest bound counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from layerpush.apps.tracing.folder import Source
from layerpush.core.push_mode import PushMode
from layerpush.telemetry.trace_records import LoadRecord, PushRecord

Join = tuple[str | None, str | None]
"""The decode engine and its request id, which a push and its load have in common."""
Pair = tuple[str, str]
"""Two clocks. Their difference is the time of the first minus the time of the second."""


@dataclass(frozen=True, slots=True)
class Offset:
    """A clock minus the reference clock, in seconds, and its source ``how``. Messages bound it: ``low`` to ``high``."""

    seconds: float
    how: str
    low: float = -math.inf
    high: float = math.inf

    @property
    def contradiction(self) -> float:
        """Seconds by which the bounds contradict each other: the clocks drift, or records are missing. Usually 0."""
        return max(0.0, self.low - self.high)


@dataclass(slots=True)
class Evidence:
    """The measurements and bounds of the difference between two clocks, in seconds."""

    measured: list[float] = field(default_factory=list)
    low: float = -math.inf
    high: float = math.inf

    def estimate(self, wall: float | None) -> Offset | None:
        """Estimate the difference. ``wall`` is the difference by the wall clocks. Returns None without any source."""
        middle = (self.low + self.high) / 2
        how, seconds = "messages", middle
        if self.measured:
            how, seconds = "handshake", statistics.median(self.measured)
        elif not math.isfinite(middle):
            if wall is None:
                return None
            how, seconds = "wall clocks", wall
        if self.low <= self.high:
            seconds = min(max(seconds, self.low), self.high)
        return Offset(seconds, how, self.low, self.high)

    def turned(self) -> Evidence:
        """The same for the clocks in the other order."""
        return Evidence([-one for one in self.measured], -self.high, -self.low)


class Clocks:
    """``offsets`` by clock, with that of the reference. The reference is a clock of D, if there is one."""

    def __init__(self, reference: str, offsets: Mapping[str, Offset]) -> None:
        self.reference = reference
        self.offsets = offsets

    def rebased(self, clock: str) -> float:
        """Seconds to add to a time of this clock to get the reference clock's time."""
        return -self.offsets[clock].seconds


def find_clocks(sources: Iterable[Source]) -> Clocks:
    """Compare every clock with the reference, directly or through other clocks.

    A clock without any source is assumed to equal the reference.
    """
    sources = list(sources)
    first = next((source for source in sources if source.loads), sources[0])
    evidence = _evidence(sources)
    walls = {one.clock: one.process.unix - one.process.t for one in sources if one.process is not None}
    offsets = {first.clock: Offset(0.0, "reference")}
    todo = [first.clock]
    while todo:
        known = todo.pop(0)
        for (ahead, behind), found in evidence.items():
            if known in (ahead, behind):
                other = ahead if behind == known else behind
                offset = (found if other == ahead else found.turned()).estimate(None)
                if other not in offsets and offset is not None:
                    offsets[other] = _added(offset, offsets[known].seconds)
                    todo.append(other)
    for source in sources:
        if source.clock not in offsets:
            both = {first.clock, source.clock} <= walls.keys()
            wall = walls[first.clock] - walls[source.clock] if both else None
            half = evidence.get((source.clock, first.clock), Evidence())
            offsets[source.clock] = half.estimate(wall) or Offset(0.0, "nothing")
    return Clocks(first.clock, offsets)


def _added(offset: Offset, seconds: float) -> Offset:
    return Offset(offset.seconds + seconds, offset.how, offset.low + seconds, offset.high + seconds)


def _evidence(sources: list[Source]) -> dict[Pair, Evidence]:
    """The evidence for each pair of clocks, P's and D's in this order."""
    evidence: dict[Pair, Evidence] = {}
    answers_with = {engine: _clock_of(engine, sources) for engine in {source.engine[0] for source in sources}}
    for source in sources:
        for load in source.loads:
            clock = answers_with.get(load.prefill_engine_id or "")
            if load.clock_offset is not None and clock is not None and clock != source.clock:
                evidence.setdefault((clock, source.clock), Evidence()).measured.append(load.clock_offset)
    for pair, pushes, loads in _joined(sources):
        known = evidence.setdefault(pair, Evidence())
        received = [push.t_registered for push in pushes if push.t_registered is not None]
        registered = [load.t_registered for load in loads if load.t_registered is not None]
        if received and registered:
            known.high = min(known.high, min(received) - min(registered))
        sent = [at for push in pushes if (at := sent_after(push)) is not None]
        settled = [load.t_settled for load in loads if load.outcome == "completed" and load.t_settled is not None]
        if sent and settled:
            known.low = max(known.low, min(sent) - min(settled))
    return evidence


def _clock_of(engine_id: str, sources: list[Source]) -> str | None:
    """The clock of an engine's side channel: that of its first rank. None if the rank was on several hosts."""
    clocks = {source.engine[1]: set[str]() for source in sources if source.engine[0] == engine_id}
    for source in sources:
        if source.engine[0] == engine_id:
            clocks[source.engine[1]].add(source.clock)
    first = clocks[min(clocks)] if clocks else set()
    return next(iter(first)) if len(first) == 1 else None


def sent_after(push: PushRecord) -> float | None:
    """A lower bound of the completion's send time in seconds. In a whole push the last WRITE carries the completion."""
    if push.outcome != "completed":
        return None
    if push.mode == PushMode.WHOLE:
        return max((write.t_post for write in push.writes), default=None)
    return push.t_last_landed


def _joined(sources: list[Source]) -> Iterator[tuple[Pair, list[PushRecord], list[LoadRecord]]]:
    """Pushes and loads of each request for which all ranks of P have one clock and all ranks of D another."""
    pushes: dict[Join, list[tuple[str, PushRecord]]] = {}
    loads: dict[Join, list[tuple[str, LoadRecord]]] = {}
    for source in sources:
        for push in source.pushes:
            pushes.setdefault((push.decode_engine_id, push.decode_request_id), []).append((source.clock, push))
        for load in source.loads:
            loads.setdefault((load.engine_id, load.request_id), []).append((source.clock, load))
    for key in pushes.keys() & loads.keys():
        clocks = {clock for clock, _ in pushes[key]}, {clock for clock, _ in loads[key]}
        if len(clocks[0]) == len(clocks[1]) == 1 and clocks[0] != clocks[1]:
            yield (clocks[0].pop(), clocks[1].pop()), [one for _, one in pushes[key]], [one for _, one in loads[key]]
