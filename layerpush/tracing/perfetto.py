"""One Chrome trace of P and D, for ui.perfetto.dev and chrome://tracing. Pure.

Each engine rank is a process. P's has lanes of pushes, in which chunks and layers are nested, and lanes of WRITEs; D's
has lanes of loads with their phases, and lanes of blocks that were set aside. What overlaps is in another lane: slices
of a lane must nest. Arrows lead from D's registration to P's push, and from P's completion back to D's load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

from layerpush.trace import LoadRecord, PushRecord
from layerpush.tracing.intervals import Computed, compute_intervals, lanes
from layerpush.tracing.report import notes
from layerpush.tracing.requests import RequestTrace, TraceSet, times

LANES = {"push": 1, "load": 1, "WRITEs": 10_000, "blocks set aside": 20_000}
"""The first lane's thread id, by what is in it."""


@dataclass(slots=True)
class Slice:
    """From ``start`` to ``end``, in seconds, with what happened in between."""

    name: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)
    inner: list[Slice] = field(default_factory=list)
    arrows: list[tuple[str, str, int, float]] = field(default_factory=list)
    """``("s" or "f", name, id, when)``: an arrow leaves or arrives here."""


def chrome_trace(traces: TraceSet) -> dict[str, Any]:
    """A JSON object in Chrome's trace event format; its times are microseconds since the first slice begins."""
    tracks: dict[tuple[str, int, str], list[Slice]] = {}
    arrows = count(1)
    for request in traces.requests:
        pushes = [push for push in request.pushes if any(times(push))]
        pushed = [_pushed(request, push) for push in pushes]
        loaded = [_loaded(request, load) for load in request.loads]
        for push, push_slice in zip(pushes, pushed, strict=True):
            tracks.setdefault((push.engine_id, push.rank, "push"), []).append(push_slice)
            tracks.setdefault((push.engine_id, push.rank, "WRITEs"), []).extend(_writes(request, push))
        for load, load_slice in zip(request.loads, loaded, strict=True):
            tracks.setdefault((load.engine_id, load.rank, "load"), []).append(load_slice)
            tracks.setdefault((load.engine_id, load.rank, "blocks set aside"), []).extend(_set_aside(request, load))
            for push, push_slice in zip(pushes, pushed, strict=True):
                _link(push, push_slice, load, load_slice, arrows)
    zero = min((one.start for slices in tracks.values() for one in slices), default=0.0)
    ids = {process: number for number, process in enumerate(dict.fromkeys(key[:2] for key in tracks), 1)}
    events: list[dict[str, Any]] = []
    for (engine, rank), pid in ids.items():
        roles = [role for role, what in (("P", "push"), ("D", "load")) if (engine, rank, what) in tracks]
        named = f"{' and '.join(roles)}: {engine} rank {rank}"
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": named}})
        events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
    for (engine, rank, what), slices in tracks.items():
        events += _track(ids[engine, rank], what, slices, zero)
    wall = _wall(traces)
    other = {"notes": list(notes(traces))} | ({} if wall is None else {"unix_time_of_zero": zero + wall})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _wall(traces: TraceSet) -> float | None:
    """What to add to a time of the reference clock for the time of day."""
    for source in traces.sources:
        if source.process is not None and source.clock == traces.clocks.reference:
            return source.process.unix - source.process.t
    return None


def _track(pid: int, what: str, slices: Sequence[Slice], zero: float) -> Iterable[dict[str, Any]]:
    chosen = lanes([(one.start, one.end) for one in slices])
    for lane in sorted(set(chosen)):
        tid = LANES[what] + lane
        name = what if lane == 0 else f"{what} ({lane + 1})"
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    for one, lane in zip(slices, chosen, strict=True):
        yield from _events(one, {"pid": pid, "tid": LANES[what] + lane}, what, zero)


def _events(one: Slice, where: dict[str, int], what: str, zero: float) -> Iterable[dict[str, Any]]:
    start, end = _nanos(one.start - zero), _nanos(one.end - zero)
    when = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    yield {"ph": "X", "name": one.name, "cat": what, **when, **where, "args": one.args}
    for kind, name, number, at in one.arrows:
        inside = max(start, min(_nanos(at - zero), end - 1))  # an arrow at the very end would belong to no slice
        binding = {"bp": "e"} if kind == "f" else {}
        yield {"ph": kind, "id": number, "name": name, "cat": "arrow", "ts": inside / 1e3, **where, **binding}
    for inner in one.inner:
        yield from _events(inner, where, what, zero)


def _nanos(seconds: float) -> int:
    return round(1e9 * seconds)


def _link(push: PushRecord, pushed: Slice, load: LoadRecord, loaded: Slice, ids: Iterator[int]) -> None:
    """Arrows between one rank of P and one of D."""
    ends: list[tuple[str, Slice, float | None, Slice, float | None]] = [
        ("registration", loaded, load.t_registered, pushed, push.t_registered)
    ]
    if push.outcome == load.outcome == "completed":
        ends.append(("completion", pushed, push.t_notified or push.t_last_landed, loaded, load.t_settled))
    for name, source, left, target, arrived in ends:
        if left is not None and arrived is not None:
            number = next(ids)
            source.arrows.append(("s", name, number, left))
            target.arrows.append(("f", name, number, arrived))


def _pushed(request: RequestTrace, push: PushRecord) -> Slice:
    marks = [push.t_first_planned, push.t_registered, push.t_last_ready, push.t_last_landed, push.t_notified]
    marks += [write.t_landed or write.t_posted for write in push.writes]
    chunks = _chunks(push)
    marks += [at for chunk in chunks for at in (chunk.start, chunk.end)]
    known = [at for at in marks if at is not None]
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
    return Slice(request.name, min(known), max(known), args, chunks)


def _chunks(push: PushRecord) -> list[Slice]:
    """Slices of a lane must not overlap: a chunk that was planned while the last one was computed begins after it."""
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
        chunks.append(Slice(f"chunk {index}", begin, cuts[-1], args, inner))
    return chunks


def _writes(request: RequestTrace, push: PushRecord) -> list[Slice]:
    slices = []
    for write in push.writes:
        first, last = write.layers
        what = "regions" if push.mode == "request" else "layers"
        args = {
            "request": request.name,
            "remote_rank": write.remote_rank,
            "descriptors": write.descriptors,
            "bytes": write.bytes,
            "posting_us": _nanos(write.t_posted - write.t_post) / 1e3,
            "landed": write.t_landed is not None,
        }
        slices.append(Slice(f"WRITE {what} {first}-{last}", write.t_post, write.t_landed or write.t_posted, args))
    return slices


def _loaded(request: RequestTrace, load: LoadRecord) -> Slice:
    marks = [load.t_awaited, load.t_registered, load.t_settled, load.t_reported]
    known = [at for at in marks if at is not None]
    args = {
        "request_id": load.request_id,
        "prefill_engine_id": load.prefill_engine_id,
        "outcome": load.outcome,
        "reason": load.reason,
        "blocks": load.blocks,
    }
    whole = Slice(request.name, min(known), max(known), args)
    for name, start, end in zip(("register", "await P", "tell the engine"), marks[:-1], marks[1:], strict=True):
        if start is not None and end is not None:
            whole.inner.append(Slice(name, start, end))
    return whole


def _set_aside(request: RequestTrace, load: LoadRecord) -> list[Slice]:
    if load.t_parked is None:
        return []
    end = load.t_cleared or load.t_reported or load.t_parked
    return [Slice(request.name, load.t_parked, end, {"freed": load.t_cleared is not None})]
