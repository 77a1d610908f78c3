"""Exports an OpenTelemetry span of each push and each load, in the trace that the request's client began.

vLLM's API server makes one span per request, ``llm_request``, when the request is over. Only that process knows the
span's id, so ours cannot be its children: they lie beside it, below the client's span. A request without a
``traceparent`` header has no such parent, and gets no spans.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import FirstTokenRecord, LoadRecord, PushRecord, Record

logger = logging.getLogger(f"vllm.{__name__}")

HEADERS_KEPT = 1 << 14
QUIET_S = 60.0

Headers = Mapping[str, str]
Emit = Callable[[str, int, int, Mapping[str, Any], Headers], None]
"""Takes the span's name, its start and end in nanoseconds of Unix time, its attributes, and the trace's headers."""


class Spans:
    """Remembers the headers of requests until their push or load is over, and then emits the span. Writer thread."""

    def __init__(self, emit: Emit, request_id_key: str) -> None:
        self._emit = emit
        self._request_id_key = request_id_key
        self._headers: dict[str, Headers] = {}
        self._peer_errors = PeerErrors(logger, QUIET_S)

    def expect(self, request_id: str, headers: Headers) -> None:
        """Remember the headers of a request of this engine."""
        self._headers[request_id] = headers
        if len(self._headers) > HEADERS_KEPT:
            del self._headers[next(iter(self._headers))]

    def record_ended(self, record: PushRecord | LoadRecord) -> None:
        """Emit the span of a push or load that is over. A load that is recorded twice gets one span."""
        headers = self._headers.pop(record.request_id, None)
        marks = [at for at in _marks(record) if at is not None]
        if headers is None or not marks:
            return
        zero = time.time_ns() - round(1e9 * time.perf_counter())
        start, end = (zero + round(1e9 * at) for at in (min(marks), max(marks)))
        attributes = {self._request_id_key: record.request_id, **dict(_attributes(record))}
        try:
            self._emit(f"layerpush.{record.kind}", start, end, attributes, headers)
        except Exception as error:  # noqa: BLE001  a defective exporter costs a span, never a push
            text = f"the span of {record.request_id} is lost: {type(error).__name__}: {error}"
            self._peer_errors.count("span lost", text, time.perf_counter())


class SpannedTrace(TraceFile):
    """A worker's trace file, which also emits a span for each push and load."""

    def __init__(self, directory: str | None, engine_id: str, rank: int, spans: Spans) -> None:
        super().__init__(directory, engine_id, rank)
        self._spans = spans

    def write_record(self, record: Record) -> None:
        super().write_record(record)
        if not isinstance(record, FirstTokenRecord):
            self._spans.record_ended(record)


def _marks(record: PushRecord | LoadRecord) -> tuple[float | None, ...]:
    if isinstance(record, LoadRecord):
        return record.t_awaited, record.t_registered, record.t_settled, record.t_reported
    return record.t_registered, record.t_first_planned, record.t_last_ready, record.t_last_landed, record.t_notified


def _attributes(record: PushRecord | LoadRecord) -> Iterator[tuple[str, str | int | float]]:
    """The attributes that have no standard name, with our prefix. Unknown values are left out."""
    known: dict[str, str | int | float | None] = {
        "engine_id": record.engine_id,
        "rank": record.rank,
        "outcome": record.outcome,
        "reason": record.reason,
    }
    if isinstance(record, LoadRecord):
        known["prefill_engine_id"] = record.prefill_engine_id
        known["seconds_until_settled"] = _between(record.t_awaited, record.t_settled)
    else:
        known |= {"decode_engine_id": record.decode_engine_id, "mode": record.mode, "fallback": record.fallback}
        known["tokens"] = record.tokens
        known["prefill_seconds"] = _between(record.t_first_planned, record.t_last_ready)
        known["exposed_seconds"] = record.exposed_s(record.t_last_ready)
    for name, value in known.items():
        if value is not None:
            yield f"layerpush.{name}", value


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
