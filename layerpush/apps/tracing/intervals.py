"""The computation times of a push's layers, the phases of a load and of a first token, and their lanes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from layerpush.telemetry.trace_records import FirstTokenRecord, LoadRecord, PushRecord

PHASES = ("register", "await P", "report")
TOKEN_PHASES = ("schedule", "first step")


class Computed(NamedTuple):
    """One layer of one chunk was computed from ``start`` to ``end`` (seconds)."""

    chunk: int
    layer: int
    start: float
    end: float


def compute_intervals(push: PushRecord) -> list[Computed]:
    """The interval in which each (chunk, layer) was computed, by chunk and time.

    A layer begins when the layer before it in its chunk was ready; the first layer begins when its chunk was planned.
    """
    intervals: list[Computed] = []
    for chunk, layer, ready, _hooked in sorted(push.ready, key=lambda row: (row[0], row[2])):
        if intervals and intervals[-1].chunk == chunk:
            start = intervals[-1].end
        else:
            start = push.chunks[chunk].t_planned if chunk < len(push.chunks) else ready
        intervals.append(Computed(chunk, layer, min(start, ready), ready))
    return intervals


def marks(load: LoadRecord) -> tuple[float | None, ...]:
    """The times that bound the phases of a load, in order; None for an unknown time."""
    return load.t_awaited, load.t_registered, load.t_settled, load.t_reported


def phases(load: LoadRecord) -> Iterator[tuple[str, float, float]]:
    """Name, start and end (seconds) of each phase whose two ends are known."""
    for name, (start, end) in zip(PHASES, pairwise(marks(load)), strict=True):
        if start is not None and end is not None:
            yield name, start, end


def token_phases(token: FirstTokenRecord) -> Iterator[tuple[str, float, float]]:
    """Name, start and end (seconds) of each known phase of a first token. Without a step there is no "first step"."""
    bounds = token.t_all_reported, token.t_scheduled or token.t_first_token, token.t_first_token
    for name, (start, end) in zip(TOKEN_PHASES, pairwise(bounds), strict=True):
        if start is not None and end is not None and start < end:
            yield name, start, end


def lanes(intervals: Iterable[tuple[float, float]]) -> list[int]:
    """The lane of each interval: the lowest one in which it overlaps no interval that began earlier."""
    given = list(intervals)
    chosen = [0] * len(given)
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for index in sorted(range(len(given)), key=given.__getitem__):
        start, end = given[index]
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        chosen[index] = lane = heappop(free) if free else len(busy)
        heappush(busy, (end, lane))
    return chosen
