"""A span of each push and load, in the trace of the request's client; none where there is no such trace."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from layerpush.telemetry import spans as spans_module
from layerpush.telemetry.spans import SpannedTrace, Spans
from tests.unit.trace_hosts import load, push

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
Emitted = tuple[str, int, int, Mapping[str, Any], Mapping[str, str]]


@pytest.fixture
def emitted() -> list[Emitted]:
    return []


@pytest.fixture
def spans(emitted: list[Emitted]) -> Spans:
    return Spans(lambda *span: emitted.append(span), "gen_ai.request.id")


def test_a_push_is_a_span_in_the_trace_of_its_client(spans: Spans, emitted: list[Emitted]) -> None:
    now, unix = time.perf_counter(), time.time()
    one = push(tokens=7, t_registered=now + 1, t_first_planned=now, t_last_ready=now + 2, t_last_landed=now + 2.5)
    spans.expect(one.request_id, HEADERS)
    spans.record_ended(one)
    ((name, start, end, attributes, headers),) = emitted
    assert (name, headers) == ("layerpush.push", HEADERS)
    assert start == pytest.approx(1e9 * unix, abs=1e8)
    assert end - start == 2_500_000_000
    assert attributes.pop("layerpush.prefill_seconds") == pytest.approx(2.0)
    assert attributes.pop("layerpush.exposed_seconds") == pytest.approx(0.5)
    assert attributes == {
        "gen_ai.request.id": one.request_id,
        "layerpush.engine_id": "P",
        "layerpush.decode_engine_id": "D",
        "layerpush.rank": 0,
        "layerpush.mode": "layer",
        "layerpush.outcome": "completed",
        "layerpush.tokens": 7,
    }


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ({"t_registered": 1.0, "t_last_landed": 4.0, "t_notified": 4.5}, 2.0),
        ({"t_registered": 3.0, "t_last_landed": 4.0, "t_notified": 4.5}, 2.0),
        ({"t_registered": 3.0, "t_last_landed": 4.0}, 2.0),
        ({"t_last_landed": 4.0}, 2.0),
        ({"t_registered": 1.0, "t_notified": 4.5}, None),
    ],
    ids=["early registration", "late registration", "whole request", "no registration", "no WRITE"],
)
def test_exposed_seconds_are_those_of_the_metric(
    spans: Spans, emitted: list[Emitted], times: dict[str, float], seconds: float | None
) -> None:
    one = push(t_last_ready=2.0, **times)
    spans.expect(one.request_id, HEADERS)
    spans.record_ended(one)
    ((_, _, _, attributes, _),) = emitted
    assert attributes.get("layerpush.exposed_seconds") == seconds


def test_a_load_is_a_span_in_the_trace_of_its_client(spans: Spans, emitted: list[Emitted]) -> None:
    one = load(outcome="failed", reason="P is gone", t_awaited=1.0, t_settled=3.0, t_reported=3.5)
    spans.expect(one.request_id, HEADERS)
    spans.record_ended(one)
    ((name, start, end, attributes, _),) = emitted
    assert (name, end - start) == ("layerpush.load", 2_500_000_000)
    assert (attributes["layerpush.reason"], attributes["layerpush.seconds_until_settled"]) == ("P is gone", 2.0)


def test_a_request_without_a_trace_has_no_span(spans: Spans, emitted: list[Emitted]) -> None:
    spans.expect("another", HEADERS)
    spans.record_ended(push(t_first_planned=1.0))
    assert emitted == []


def test_a_load_with_parked_blocks_has_one_span(spans: Spans, emitted: list[Emitted]) -> None:
    spans.expect(load().request_id, HEADERS)
    spans.record_ended(load(t_parked=2.0, t_reported=3.0))
    spans.record_ended(load(t_parked=2.0, t_reported=3.0, t_cleared=9.0))
    assert len(emitted) == 1


def test_a_push_without_times_has_no_span(spans: Spans, emitted: list[Emitted]) -> None:
    spans.expect(push().request_id, HEADERS)
    spans.record_ended(push(outcome="failed"))
    assert emitted == []


def test_headers_of_endless_requests_are_forgotten(
    spans: Spans, emitted: list[Emitted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans_module, "HEADERS_KEPT", 2)
    for name in ("a", "b", "c"):
        spans.expect(name, HEADERS)
    for name in ("a", "b", "c"):
        spans.record_ended(push(request_id=name, t_first_planned=1.0))
    assert [attributes["gen_ai.request.id"] for _, _, _, attributes, _ in emitted] == ["b", "c"]


def test_a_failed_exporter_loses_only_the_span(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no collector")

    spans = Spans(broken, "id")
    for name in ("a", "b"):
        spans.expect(name, HEADERS)
        spans.record_ended(push(request_id=name, t_first_planned=1.0))
    (line,) = [record.message for record in caplog.records]
    assert "RuntimeError: no collector" in line


def test_records_are_exported_with_and_without_a_trace_file(
    tmp_path: Path, spans: Spans, emitted: list[Emitted]
) -> None:
    for directory in (None, str(tmp_path)):
        trace = SpannedTrace(directory, "P", 0, spans)
        spans.expect(push().request_id, HEADERS)
        trace.write_record(push(t_first_planned=1.0))
        trace.close()
    assert len(emitted) == 2
    (path,) = tmp_path.iterdir()
    assert b'"push"' in path.read_bytes()
