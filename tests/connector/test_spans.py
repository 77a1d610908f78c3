"""A request's OpenTelemetry headers from vLLM's scheduler to the workers, and our spans through vLLM's hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from layerpush.compat.metadata import TraceHeaders
from layerpush.telemetry.spans import Spans
from tests.connector.conftest import PORTS
from tests.connector.engine import cache_config, config_of
from tests.connector.test_decode_scheduler import Decode
from tests.unit.trace_hosts import push

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
COLLECTOR = "http://127.0.0.1:1"
"""Nothing listens there, and nothing connects: only vLLM's API server would set up the tracer."""


@pytest.fixture
def engine(world: None, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], Decode]]:
    engines: list[Decode] = []

    def build(endpoint: str | None) -> Decode:
        port = PORTS.next_free()
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        config = config_of(model, "kv_both", f"spans-{port}", otlp_traces_endpoint=endpoint)
        engines.append(Decode(config, cache_config()))
        return engines[-1]

    yield build
    for one in engines:
        one.scheduler.shutdown()


def arrive(engine: Decode, request_id: str, params: dict[str, Any] | None, headers: dict[str, str] | None) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params})
    sampling.update_from_generation_config({}, None)
    engine.requests[request_id] = Request(request_id, list(range(3, 20)), sampling, None, trace_headers=headers)
    engine.scheduler.add_request(engine.requests[request_id])


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def test_workers_get_the_trace_headers_of_a_request_once(engine: Callable[[str | None], Decode]) -> None:
    one = engine(COLLECTOR)
    arrive(one, "traced", PREFILL, HEADERS)
    arrive(one, "not traced", PREFILL, None)
    arrive(one, "not pushed", None, HEADERS)
    one.step()
    assert one.news(TraceHeaders) == [TraceHeaders("traced", HEADERS)]
    one.step()
    assert one.news(TraceHeaders) == []


def test_without_a_collector_workers_get_no_trace_headers(engine: Callable[[str | None], Decode]) -> None:
    one = engine(None)
    arrive(one, "traced", PREFILL, HEADERS)
    one.step()
    assert one.news(TraceHeaders) == []


@pytest.fixture
def exported() -> Iterator[Any]:
    """The spans that OpenTelemetry would send, if vLLM had set up its tracer for a collector."""
    telemetry = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    before = telemetry._TRACER_PROVIDER
    telemetry._TRACER_PROVIDER = provider
    yield exporter
    telemetry._TRACER_PROVIDER = before


def test_vllms_hook_puts_the_push_span_below_the_clients_span(exported: Any) -> None:
    from layerpush.compat.spans import REQUEST_ID, emit_span

    spans = Spans(emit_span, REQUEST_ID)
    spans.expect(push().request_id, HEADERS)
    spans.record_ended(push(t_first_planned=1.0, t_last_ready=2.0))
    (span,) = exported.get_finished_spans()
    assert span.name == "layerpush.push"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.end_time - span.start_time == 1_000_000_000
    assert span.attributes["gen_ai.request.id"] == push().request_id


def test_without_opentelemetry_nothing_is_exported(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without its packages: vLLM starts all the same, and so does layerpush."""
    from vllm.tracing import otel

    from layerpush.compat.spans import REQUEST_ID, emit_span

    monkeypatch.setattr(otel, "_IS_OTEL_AVAILABLE", False)
    spans = Spans(emit_span, REQUEST_ID)
    spans.expect(push().request_id, HEADERS)
    spans.record_ended(push(t_first_planned=1.0, t_last_ready=2.0))
    assert exported.get_finished_spans() == ()


def test_vllms_hook_without_a_collector_does_nothing() -> None:
    from layerpush.compat.spans import emit_span

    emit_span("layerpush.push", 1, 2, {}, HEADERS)
