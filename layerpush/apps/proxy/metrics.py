"""The proxy's own metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
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
        self._registry.register(_Gauges(fleet, gate))
        self.requests = self._counter("requests", "Requests by how they ended", "endpoint", "outcome")
        self.dispatches = self._counter("dispatches", "How P and D were asked", "mode")
        self.retries = self._counter("retries", "Requests sent again before their first token")
        self.leg_failures = self._counter("leg_failures", "Requests to engines that failed", "role", "engine", "reason")
        self.first_token = self._histogram("time_to_first_token_seconds", "From the request to D's first token")
        self.duration = self._histogram("request_duration_seconds", "From the request to the end of its answer")

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


class _Gauges(Collector):
    """Gauges that are read when Prometheus scrapes."""

    def __init__(self, fleet: Fleet, gate: Gate) -> None:
        self._fleet = fleet
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        yield _gauge("requests_under_way", "Requests that have been let in", self._gate.under_way)
        yield _gauge("requests_queued", "Requests that wait to be let in", self._gate.queued)
        yield from self._instances()

    def _instances(self) -> Iterator[Metric]:
        labels = ("role", "engine")
        healthy = GaugeMetricFamily("layerpush_proxy_engine_healthy", "1 if requests are sent to it", labels=labels)
        known = GaugeMetricFamily(
            "layerpush_proxy_engine_identity_known", "1 if P and D can be asked at the same time", labels=labels
        )
        tokens = GaugeMetricFamily(
            "layerpush_proxy_engine_outstanding_tokens", "About how many tokens it has to compute", labels=labels
        )
        for each in self._fleet:
            values = (each.role, each.url)
            healthy.add_metric(values, each.healthy)
            tokens.add_metric(values, each.outstanding_tokens)
            if each.role == "prefill":
                known.add_metric(values, each.identity is not None)
        yield from (healthy, known, tokens)


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"layerpush_proxy_{name}", help_text, value=value)
