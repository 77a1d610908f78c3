"""vLLM's OpenTelemetry hook, ``vllm.tracing``. It exports spans if an engine has ``--otlp-traces-endpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.tracing import SpanAttributes, extract_trace_context, instrument_manual

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REQUEST_ID: str = SpanAttributes.GEN_AI_REQUEST_ID


def traces_requests(vllm_config: VllmConfig) -> bool:
    """Whether this engine exports spans. If so, vLLM sets up the tracers of its workers."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None


def emit_span(name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """Queue a span for export in the trace of the request's W3C ``headers``. Times are in nanoseconds of Unix time."""
    context = extract_trace_context(headers)
    if context is not None:
        instrument_manual(name, start_ns, end_ns, dict(attributes), context)
