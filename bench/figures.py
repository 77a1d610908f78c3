"""The figures of one push, for the demo and the benchmarks. Pure, except ``read_pushes``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerpush.apps.tracing.folder import read_lines
from layerpush.telemetry.trace_records import PushRecord


class TraceError(ValueError):
    """A push has no figures: it was not completed, or a time is missing."""


@dataclass(frozen=True)
class Figures:
    """The cost of one push. Times in milliseconds; layers are counted once per chunk."""

    prefill_ms: float
    transfer_ms: float
    exposed_ms: float
    hooked_layers: int
    swept_layers: int
    writes: int
    descriptors: int
    bytes: int


def read_pushes(directory: Path) -> list[PushRecord]:
    """All pushes in the ``*.jsonl`` files of a ``trace_dir``, file by file. It skips lines that it cannot read."""
    pushes = []
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as file:
            pushes += [push for source in read_lines(path, file) for push in source.pushes]
    return pushes


def completed_times(push: PushRecord) -> tuple[float, float, float]:
    """The times at which its first chunk was planned, its last layer ready, and its last WRITE landed, in seconds.

    Raises ``TraceError`` unless the push was completed.
    """
    if push.outcome != "completed":
        raise TraceError(f"the push of {push.request_id} {push.outcome}: {push.reason or 'no reason given'}")
    if push.t_first_planned is None or push.t_last_ready is None or push.t_last_landed is None:
        raise TraceError(f"the trace of {push.request_id} lacks the time when it was planned, ready or landed")
    return push.t_first_planned, push.t_last_ready, push.t_last_landed


def figures_of(push: PushRecord) -> Figures:
    """The figures of one push. Raises ``TraceError`` unless it was completed and every WRITE landed."""
    first_planned, last_ready, last_landed = completed_times(push)
    writes = [(write.t_post, write.t_landed) for write in push.writes if write.t_landed is not None]
    if len(writes) < len(push.writes):
        raise TraceError(f"a WRITE of {push.request_id} has not landed")
    return Figures(
        prefill_ms=1e3 * (last_ready - first_planned),
        transfer_ms=1e3 * union_length(writes),
        exposed_ms=1e3 * (last_landed - last_ready),
        hooked_layers=push.hooked_layers,
        swept_layers=push.swept_layers,
        writes=len(push.writes),
        descriptors=sum(write.descriptors for write in push.writes),
        bytes=sum(write.bytes for write in push.writes),
    )


def median_figures(figures: Sequence[Figures]) -> Figures:
    """Medians by field. Counts stay integers; ``swept_layers`` is the maximum. ``TraceError`` without figures."""
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


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of the intervals."""
    total, covered_to = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total
