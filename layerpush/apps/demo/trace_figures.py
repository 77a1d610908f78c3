"""From a prefill worker's trace lines to the figures of one push. Pure: no clock, no network, no engine."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from layerpush.apps.tracing.intervals import union_length
from layerpush.apps.tracing.requests import without_suffix
from layerpush.telemetry.trace_records import PushRecord


class TraceError(ValueError):
    """A trace line that cannot be read, or a push that was not completed."""


class Times(NamedTuple):
    """The turning points of a completed push, in ``time.perf_counter()`` seconds."""

    first_planned: float
    last_ready: float
    last_landed: float


@dataclass(frozen=True)
class Figures:
    """What one push cost. Times in milliseconds; layers are counted once per chunk."""

    prefill_ms: float
    transfer_ms: float
    exposed_ms: float
    hooked_layers: int
    swept_layers: int
    writes: int
    descriptors: int
    bytes: int


def parse_pushes(lines: Iterable[str]) -> list[PushRecord]:
    """The pushes among JSONL ``lines``; lines of another kind are passed over. Raises ``TraceError``."""
    pushes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if msgspec.json.decode(line, type=_Kind).kind == "push":
                pushes.append(msgspec.json.decode(line, type=PushRecord))
        except msgspec.DecodeError as error:
            raise TraceError(f"trace line {number}: {error}") from error
    return pushes


def read_pushes(directory: Path) -> list[PushRecord]:
    """All pushes in the ``*.jsonl`` files of a ``trace_dir``. A line still being written is left for the next call."""
    pushes = []
    for path in sorted(directory.glob("*.jsonl")):
        whole_lines, _, _ = path.read_text().rpartition("\n")
        pushes += parse_pushes(whole_lines.splitlines())
    return pushes


def by_request(pushes: Iterable[PushRecord]) -> dict[str, PushRecord]:
    """The latest push of each request, by P's request id without the suffix that vLLM gave it."""
    return {without_suffix(push.request_id): push for push in pushes}


def times_of(push: PushRecord) -> Times:
    """The turning points. Raises ``TraceError`` unless the push was completed and every WRITE landed."""
    if push.outcome != "completed":
        raise TraceError(f"the push of {push.request_id} {push.outcome}: {push.reason or 'no reason given'}")
    if push.t_first_planned is None or push.t_last_ready is None or push.t_last_landed is None:
        raise TraceError(f"the trace of {push.request_id} lacks the time when it was planned, ready or landed")
    return Times(push.t_first_planned, push.t_last_ready, push.t_last_landed)


def write_intervals(push: PushRecord) -> list[tuple[float, float]]:
    """When each WRITE was posted and when it landed, in the order of ``push.writes``. Raises ``TraceError``."""
    intervals = []
    for write in push.writes:
        if write.t_landed is None:
            raise TraceError(f"a WRITE of {push.request_id} has not landed")
        intervals.append((write.t_post, write.t_landed))
    return intervals


def figures_of(push: PushRecord) -> Figures:
    """The figures of one completed push. Raises ``TraceError``."""
    times = times_of(push)
    return Figures(
        prefill_ms=1e3 * (times.last_ready - times.first_planned),
        transfer_ms=1e3 * union_length(write_intervals(push)),
        exposed_ms=1e3 * (times.last_landed - times.last_ready),
        hooked_layers=push.hooked_layers,
        swept_layers=push.swept_layers,
        writes=len(push.writes),
        descriptors=sum(write.descriptors for write in push.writes),
        bytes=sum(write.bytes for write in push.writes),
    )


def median_figures(figures: Sequence[Figures]) -> Figures:
    """Field by field; counts stay counts, and ``swept_layers`` is the worst. Raises ``TraceError`` for none."""
    if not figures:
        raise TraceError("no push to take figures from")
    return Figures(
        prefill_ms=statistics.median(one.prefill_ms for one in figures),
        transfer_ms=statistics.median(one.transfer_ms for one in figures),
        exposed_ms=statistics.median(one.exposed_ms for one in figures),
        hooked_layers=statistics.median_low([one.hooked_layers for one in figures]),
        swept_layers=max(one.swept_layers for one in figures),
        writes=statistics.median_low([one.writes for one in figures]),
        descriptors=statistics.median_low([one.descriptors for one in figures]),
        bytes=statistics.median_low([one.bytes for one in figures]),
    )


class _Kind(msgspec.Struct):
    kind: str
