"""Writes one Chrome trace of P and D, for ui.perfetto.dev and chrome://tracing. Pure.

Each engine rank is a process, and so is D's scheduler. A rank of P has lanes of pushes, in which chunks and layers are
nested, and lanes of WRITEs. A rank of D has lanes of loads with their phases, and lanes of parked blocks.
D's scheduler has lanes of first tokens with their phases. Slices in a lane must nest, so slices that overlap go to
different lanes. Arrows lead from D's registration to P's push, and from P's completion to D's load.

Source of the format: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise, starmap
from typing import Any, TypeVar

import msgspec

from layerpush.apps.tracing.clocks import sent_after
from layerpush.apps.tracing.intervals import Computed, compute_intervals, lanes, marks, phases, token_phases
from layerpush.apps.tracing.report import notes
from layerpush.apps.tracing.requests import RequestTrace, TraceSet, times
from layerpush.core.push_mode import PushMode
from layerpush.telemetry.trace_records import SCHEDULER_RANK, LoadRecord, PushRecord

TraceEvent = dict[str, Any]
Track = tuple[str, int, str]
"""Engine, rank, and the kind of slices: a key of ``LANES``."""
R = TypeVar("R", PushRecord, LoadRecord)
LANES = {"push": 1, "load": 1, "first token": 1, "WRITEs": 10_000, "parked blocks": 20_000}
"""The first lane's thread id, by kind of slices."""


@dataclass(slots=True)
class Slice:
    """A slice from ``start`` to ``end``, in seconds. ``inner`` returns the slices inside, which need no lanes."""

    name: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)
    inner: Callable[[], Iterable[Slice]] = tuple
    arrows: list[tuple[str, str, int, float]] = field(default_factory=list)
    """``(kind, name, id, time)`` of arrows, with the time in seconds. Kind "s": it starts here, "f": it ends here."""


def chrome_trace(traces: TraceSet) -> Iterator[bytes]:
    """A JSON object in Chrome's trace event format, in pieces, because it may be too large for memory.

    Its times are microseconds since the beginning of the first slice.
    """
    encode = msgspec.json.Encoder().encode
    layout = _Layout(traces)
    unix_offset = _unix_offset(traces)
    other = {"notes": list(notes(traces))} | (
        {} if unix_offset is None else {"unix_time_of_zero": layout.zero + unix_offset}
    )
    yield b'{"displayTimeUnit":"ms","otherData":' + encode(other) + b',"traceEvents":['
    yield encode(list(layout.names()))[1:-1]
    numbers = count(1)
    for request in traces.requests:
        for place, category, item in layout.placed(_slices(request, numbers)):
            yield b"," + encode(list(_events(item, place, category, layout.zero)))[1:-1]
    yield b"]}\n"


class _Layout:
    """Assigns lanes to slices, from the times of all slices. ``placed`` takes the slices in the same order."""

    def __init__(self, traces: TraceSet) -> None:
        spans: dict[Track, list[tuple[float, float]]] = {}
        for request in traces.requests:
            for track, item in _slices(request, count()):
                spans.setdefault(track, []).append((item.start, item.end))
        self.zero = min((start for of_track in spans.values() for start, _ in of_track), default=0.0)
        self._ids = {process: number for number, process in enumerate(dict.fromkeys(track[:2] for track in spans), 1)}
        self._lanes = {track: array("I", lanes(of_track)) for track, of_track in spans.items()}
        self._taken = dict.fromkeys(self._lanes, 0)

    def names(self) -> Iterator[TraceEvent]:
        """Events that name the processes and lanes, and set their order."""
        for (engine, rank), pid in self._ids.items():
            roles = [
                role for role, category in (("P", "push"), ("D", "load")) if (engine, rank, category) in self._lanes
            ]
            named = f"{' and '.join(roles)}: {engine} rank {rank}"
            if rank == SCHEDULER_RANK:
                named = f"D: {engine} scheduler"
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": named}}
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for (engine, rank, category), chosen in self._lanes.items():
            pid = self._ids[engine, rank]
            for lane in sorted(set(chosen)):
                tid = LANES[category] + lane
                name = category if lane == 0 else f"{category} ({lane + 1})"
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}

    def placed(self, slices: Iterable[tuple[Track, Slice]]) -> Iterator[tuple[dict[str, int], str, Slice]]:
        for track, item in slices:
            engine, rank, category = track
            lane = self._lanes[track][self._taken[track]]
            self._taken[track] += 1
            yield {"pid": self._ids[engine, rank], "tid": LANES[category] + lane}, category, item


def _slices(request: RequestTrace, arrows: Iterator[int]) -> Iterator[tuple[Track, Slice]]:
    pushes, loads = _timed(request.pushes), _timed(request.loads)
    pushed = [_pushed(request, push) for push in pushes]
    loaded = [_loaded(request, load) for load in loads]
    for load, load_slice in zip(loads, loaded, strict=True):
        for push, push_slice in zip(pushes, pushed, strict=True):
            _link(push, push_slice, load, load_slice, arrows)
    for push, push_slice in zip(pushes, pushed, strict=True):
        yield (push.engine_id, push.rank, "push"), push_slice
        for write in _writes(request, push):
            yield (push.engine_id, push.rank, "WRITEs"), write
    for load, load_slice in zip(loads, loaded, strict=True):
        yield (load.engine_id, load.rank, "load"), load_slice
        if load.t_parked is not None:
            args = {"freed": load.t_cleared is not None}
            yield (
                (load.engine_id, load.rank, "parked blocks"),
                Slice(request.name, load.t_parked, _cleared(load), args),
            )
    for token in request.first_tokens:
        known = list(starmap(Slice, token_phases(token)))
        if known:
            first_token = Slice(request.name, known[0].start, known[-1].end, inner=partial(iter, known))
            yield (token.engine_id, SCHEDULER_RANK, "first token"), first_token


def _timed(records: Iterable[R]) -> list[R]:
    """The records that have any time."""
    return [record for record in records if any(times(record))]


def _unix_offset(traces: TraceSet) -> float | None:
    """Seconds to add to a time of the reference clock to get Unix time; None if unknown."""
    for source in traces.sources:
        if source.process is not None and source.clock == traces.clocks.reference:
            return source.process.unix - source.process.t
    return None


def _events(item: Slice, place: dict[str, int], category: str, zero: float) -> Iterator[TraceEvent]:
    start, end = _nanos(item.start - zero), _nanos(item.end - zero)
    when = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    yield {"ph": "X", "name": item.name, "cat": category, **when, **place, "args": item.args}
    for kind, name, number, at in item.arrows:
        inside = max(start, min(_nanos(at - zero), end - 1))  # an arrow at the very end belongs to no slice
        binding = {"bp": "e"} if kind == "f" else {}
        yield {"ph": kind, "id": number, "name": name, "cat": "arrow", "ts": inside / 1e3, **place, **binding}
    for inner in item.inner():
        yield from _events(inner, place, category, zero)


def _nanos(seconds: float) -> int:
    return round(1e9 * seconds)


def _link(push: PushRecord, pushed: Slice, load: LoadRecord, loaded: Slice, ids: Iterator[int]) -> None:
    """Arrows between one rank of P and one rank of D."""
    ends: list[tuple[str, Slice, float | None, Slice, float | None]] = [
        ("registration", loaded, load.t_registered, pushed, push.t_registered)
    ]
    if push.outcome == load.outcome == "completed":
        ends.append(("completion", pushed, _sent(push, load), loaded, load.t_settled))
    for name, source, left, target, arrived in ends:
        if left is not None and arrived is not None:
            number = next(ids)
            source.arrows.append(("s", name, number, left))
            target.arrows.append(("f", name, number, arrived))


def _sent(push: PushRecord, load: LoadRecord) -> float | None:
    """The time when the completion was sent. P records it a little later, on a busy host even after D received it."""
    noted, after = push.t_notified or push.t_last_landed, sent_after(push)
    if noted is None or after is None or load.t_settled is None:
        return noted
    return max(after, min(noted, load.t_settled))


def _push_span(push: PushRecord) -> tuple[float, float]:
    known = [at for _, at in times(push)]
    known += [write.t_landed or write.t_posted for write in push.writes]
    known += [at for _, _, at, _ in push.ready]
    if push.ready:
        known += [chunk.t_planned for chunk in push.chunks]
    return min(known), max(known)


def _pushed(request: RequestTrace, push: PushRecord) -> Slice:
    args = {
        "request_id": push.request_id,
        "decode_request_id": push.decode_request_id,
        "mode": push.mode,
        "fallback": push.fallback,
        "outcome": push.outcome,
        "reason": push.reason,
        "tokens": push.tokens,
        "preemptions": push.epoch,
        "writes": len(push.writes),
        "bytes": sum(write.bytes for write in push.writes),
    }
    return Slice(request.name, *_push_span(push), args, partial(_chunks, push))


def _chunks(push: PushRecord) -> list[Slice]:
    """Slices of the chunks. They must not overlap: a chunk begins after the previous one, even if planned earlier."""
    chunks: list[Slice] = []
    layers: dict[int, list[Computed]] = {}
    for computed in compute_intervals(push):
        layers.setdefault(computed.chunk, []).append(computed)
    for index, rows in layers.items():
        begin = max(rows[0].start, chunks[-1].end if chunks else rows[0].start)
        cuts = [begin, *(max(begin, row.end) for row in rows)]
        named = zip(rows, pairwise(cuts), strict=True)
        inner = [Slice(f"layer {row.layer}", start, end) for row, (start, end) in named]
        known = push.chunks[index] if index < len(push.chunks) else None
        args = {} if known is None else {"blocks": [known.start_block, known.end_block]}
        chunks.append(Slice(f"chunk {index}", begin, cuts[-1], args, partial(iter, inner)))
    return chunks


def _writes(request: RequestTrace, push: PushRecord) -> list[Slice]:
    slices = []
    for write in push.writes:
        first, last = write.layers
        unit = "regions" if push.mode == PushMode.WHOLE else "layers"
        args = {
            "request": request.name,
            "remote_rank": write.remote_rank,
            "descriptors": write.descriptors,
            "bytes": write.bytes,
            "posting_us": _nanos(write.t_posted - write.t_post) / 1e3,
            "landed": write.t_landed is not None,
        }
        slices.append(Slice(f"WRITE {unit} {first}-{last}", write.t_post, write.t_landed or write.t_posted, args))
    return slices


def _load_span(load: LoadRecord) -> tuple[float, float]:
    """Start and end of a load in seconds, without the time in which its blocks were parked."""
    known = [at for at in marks(load) if at is not None] or [at for _, at in times(load)]
    return min(known), max(known)


def _loaded(request: RequestTrace, load: LoadRecord) -> Slice:
    args = {
        "request_id": load.request_id,
        "prefill_engine_id": load.prefill_engine_id,
        "outcome": load.outcome,
        "reason": load.reason,
        "blocks": load.blocks,
    }
    return Slice(request.name, *_load_span(load), args, lambda: starmap(Slice, phases(load)))


def _cleared(load: LoadRecord) -> float:
    return load.t_cleared or load.t_reported or load.t_parked or 0.0
