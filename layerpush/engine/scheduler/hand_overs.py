"""D's part of the hand-over: from the completion of a load until the scheduler has the request's first token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from layerpush.telemetry.metrics.catalog import (
    HAND_OVER,
    HAND_OVER_FIRST_STEP,
    HAND_OVER_REPORT,
    HAND_OVER_SCHEDULE,
    Metric,
)
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_records import FirstTokenRecord, clock_name


class Request(Protocol):
    """A request of the engine."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_output_tokens(self) -> int: ...


@dataclass(slots=True)
class _HandOver:
    request: Request
    completed_at: float | None = None
    is_timed: bool = True
    reported_at: float | None = None
    scheduled_at: float | None = None


class HandOvers:
    """Every registered request, until its first token or its end. Runs in the scheduler's thread.

    Times are seconds of ``time.perf_counter()``. ``keep`` gets the record of each request with a first token.
    """

    def __init__(self, engine_id: str, recorder: Recorder, keep: Callable[[FirstTokenRecord], None]) -> None:
        self._engine_id = engine_id
        self._recorder = recorder
        self._keep = keep
        self._clock = clock_name()
        self._open: dict[str, _HandOver] = {}
        self._reported: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def request_registered(self, request: Request) -> None:
        """A push is awaited for this request."""
        self._open[request.request_id] = _HandOver(request)

    def load_completed(self, request_id: str, at: float, clock: str) -> None:
        """A rank read the last completion of this load. With a rank of another clock than ours the load has no time."""
        known = self._open.get(request_id)
        if known is not None:
            known.completed_at = max(at, known.completed_at or at)
            known.is_timed = known.is_timed and clock == self._clock

    def loads_reported(self, received: Iterable[str], failed: Collection[str], now: float) -> None:
        """All ranks have reported these loads as over. ``failed``: those that failed."""
        for request_id in received:
            known = self._open.get(request_id)
            if known is None:
                continue
            if request_id in failed:
                del self._open[request_id]
            else:
                known.reported_at = now
                self._reported.add(request_id)

    def requests_scheduled(self, request_ids: Collection[str], now: float) -> None:
        """A step begins, with these requests in it."""
        for request_id in self._reported:
            known = self._open[request_id]
            if known.scheduled_at is None and request_id in request_ids:
                known.scheduled_at = now

    def tick(self, now: float) -> None:
        """A step's tokens have been added to its requests."""
        for request_id in [one for one in self._reported if self._open[one].request.num_output_tokens]:
            self._record(self._open.pop(request_id), now)
            self._reported.remove(request_id)

    def request_finished(self, request_id: str, now: float) -> None:
        """The engine has finished the request, in any state."""
        known = self._open.pop(request_id, None)
        self._reported.discard(request_id)
        if known is not None and known.request.num_output_tokens:
            self._record(known, now)

    def _record(self, known: _HandOver, now: float) -> None:
        if known.reported_at is None:
            return
        scheduled_at = now if known.scheduled_at is None else known.scheduled_at
        parts: list[tuple[Metric, float]] = [
            (HAND_OVER_SCHEDULE, scheduled_at - known.reported_at),
            (HAND_OVER_FIRST_STEP, now - scheduled_at),
        ]
        if known.completed_at is not None and known.is_timed:
            parts += [(HAND_OVER_REPORT, known.reported_at - known.completed_at), (HAND_OVER, now - known.completed_at)]
        self._recorder.observe(*parts)
        self._keep(
            FirstTokenRecord(
                request_id=known.request.request_id,
                engine_id=self._engine_id,
                t_all_reported=known.reported_at,
                t_scheduled=known.scheduled_at,
                t_first_token=now,
            )
        )
