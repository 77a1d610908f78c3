"""An OpenTelemetry collector for tests: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.http_servers import QuietHandler, serving


@dataclass(frozen=True)
class Span:
    """Times in seconds of Unix time; ids in hex digits."""

    name: str
    trace_id: str
    parent: str
    start: float
    end: float
    attributes: dict[str, Any]


@dataclass
class Collector:
    url: str
    _spans: list[Span] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def spans(self, trace_id: str | None = None) -> list[Span]:
        """All spans so far, or those of one trace."""
        with self._lock:
            return [span for span in self._spans if trace_id in (None, span.trace_id)]

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        spans = [_span(span) for scope in scopes for span in scope.spans]
        with self._lock:
            self._spans += spans


def _span(span: Any) -> Span:
    values = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
    start, end = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
    return Span(span.name, span.trace_id.hex(), span.parent_span_id.hex(), start, end, values)


@contextlib.contextmanager
def collector(port: int) -> Iterator[Collector]:
    """Listens on loopback until the block ends."""
    found = Collector(f"http://127.0.0.1:{port}/v1/traces")

    class SpansHandler(QuietHandler):
        def do_POST(self) -> None:
            body = self.read_body()
            found.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.answer(b"", content_type="application/x-protobuf")

    with serving(SpansHandler, port):
        yield found
