"""The proxy's own metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from layerpush.apps.proxy.fleet import Fleet
from layerpush.apps.proxy.gate import Gate

if TYPE_CHECKING:
    from layerpush.apps.proxy.legs import LegFailedError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One registry for each proxy, so that several can live in a process."""

    def __init__(self, fleet: Fleet, gate: Gate) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Ended requests by outcome", "endpoint", "outcome")
        self.dispatches = self._counter("dispatches", "Attempts by dispatch mode", "mode")
        self.retries = self._counter("retries", "Requests sent again before their first token")
        self.leg_failures = self._counter("leg_failures", "Requests to engines that failed", "role", "engine", "reason")
        self.first_token = self._histogram("time_to_first_token_seconds", "From the request to D's first token")
        self.after_prefill = self._histogram(
            "after_prefill_seconds", "From P's answer to D's first token, of streams; 0 if D answered first"
        )
        self.duration = self._histogram("request_duration_seconds", "From the request to the end of its answer")
        self._gauge("requests_under_way", "Requests under way").set_function(lambda: gate.under_way)
        self._gauge("requests_queued", "Requests that wait in the queue").set_function(lambda: gate.queued)
        self._gauge("requests_uploading", "Requests whose body arrives").set_function(lambda: gate.uploads)
        self._gauge("payload_bytes", "Bytes of request bodies in memory").set_function(lambda: gate.payload_bytes)
        self._registry.register(_Instances(fleet))

    def leg_failed(self, failure: LegFailedError) -> None:
        """Count a leg that failed."""
        self.leg_failures.labels(failure.instance.role, failure.instance.url, failure.reason).inc()

    def text(self) -> bytes:
        """The exposition that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"layerpush_proxy_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"layerpush_proxy_{name}", help_text, ("endpoint",), registry=self._registry, buckets=SECONDS)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"layerpush_proxy_{name}", help_text, registry=self._registry)


class _Instances(Collector):
    """Gauges of the instances that are listed when Prometheus scrapes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        healthy = _family("engine_healthy", "1 if requests are sent to it")
        known = _family("engine_identity_known", "1 if P and D can be asked at the same time")
        tokens = _family("engine_outstanding_tokens", "Estimated tokens that it has to compute")
        for each in self._fleet:
            labels = (each.role, each.url)
            healthy.add_metric(labels, each.healthy)
            tokens.add_metric(labels, each.outstanding_tokens)
            if each.role == "prefill":
                known.add_metric(labels, each.identity is not None)
        yield from (healthy, known, tokens)


def _family(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"layerpush_proxy_{name}", help_text, labels=("role", "engine"))
