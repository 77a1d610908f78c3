"""What the counters of a worker add up."""

from __future__ import annotations

from layerpush.telemetry.counters import PushCounters
from layerpush.telemetry.trace_records import PushRecord, WriteRecord


def record(outcome: str, fallback: str | None = None, hooked: int = 0, swept: int = 0) -> PushRecord:
    push = PushRecord(request_id="p", engine_id="e", rank=0, mode="layer", outcome=outcome, fallback=fallback)
    push.hooked_layers, push.swept_layers = hooked, swept
    return push


def test_pushes_are_counted_by_outcome_and_fallback() -> None:
    counters = PushCounters()
    counters.closed(record("completed", hooked=6, swept=2))
    counters.closed(record("completed", "late", swept=4))
    counters.closed(record("failed"))

    assert counters.outcomes == {"completed": 2, "failed": 1}
    assert counters.fallbacks == {"late": 1}
    assert (counters.hooked_layers, counters.swept_layers) == (6, 6)


def test_writes_are_counted_as_they_land() -> None:
    counters = PushCounters()
    for descriptors, size in ((3, 100), (1, 50)):
        counters.landed(WriteRecord(0, (0, 0), (0, 0), descriptors, size, 0.0, 0.0))

    assert (counters.writes, counters.descriptors, counters.bytes) == (2, 4, 150)
