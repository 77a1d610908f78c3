"""layerpush's metrics as Prometheus objects beside vLLM's, on the engine's own ``/metrics``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics

from layerpush.compat.stats import KEY
from layerpush.telemetry.metrics.catalog import CATALOG, Kind, Metric
from layerpush.telemetry.metrics.metric_delta import Buckets, MetricDelta

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LayerPushPromMetrics(NixlPromMetrics):
    """One child per engine and label value; known label values exist from the start, at 0.

    Lives in the front end's process and thread. ``observe`` gets every engine step's ``LayerPushStats.to_dict()``.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._types = {
            Kind.COUNTER: self._counter_cls,
            Kind.GAUGE: self._gauge_cls,
            Kind.HISTOGRAM: self._histogram_cls,
        }
        self._families = {metric.key: self._register(metric, labelnames) for metric in CATALOG}
        self._children: dict[tuple[int, str, str], Any] = {}
        self._levels: dict[int, MetricDelta] = {}
        for engine_idx in per_engine_labelvalues:
            for metric in CATALOG:
                for value in metric.known_values:
                    child = self._child(engine_idx, metric, value)
                    if metric.kind is Kind.GAUGE:
                        child.set(0)  # with several API servers a gauge that was never set is not shown

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        data = transfer_stats_data.get(KEY)
        if not data:
            return
        delta = MetricDelta.from_data(data)
        levels = self._levels.setdefault(engine_idx, MetricDelta())
        levels.merge({"gauges": data.get("gauges", {})})
        for metric in CATALOG:
            for value, number in delta.counters.get(metric.key, {}).items():
                self._child(engine_idx, metric, value).inc(number)
            if metric.key in delta.histograms:
                prometheus_add(self._child(engine_idx, metric), delta.histograms[metric.key])
            if metric.key in delta.gauges:
                self._child(engine_idx, metric).set(levels.highest(metric))

    def _register(self, metric: Metric, labelnames: list[str]) -> Any:
        options: dict[str, Any] = {}
        if metric.kind is Kind.GAUGE:
            options["multiprocess_mode"] = "mostrecent"
        elif metric.kind is Kind.HISTOGRAM:
            options["buckets"] = list(metric.buckets)
        own = [metric.label] if metric.label is not None else []
        meaning = metric.meaning.replace("`", "")
        return self._types[metric.kind](
            name=metric.name, documentation=meaning, labelnames=[*labelnames, *own], **options
        )

    def _child(self, engine_idx: int, metric: Metric, value: str = "") -> Any:
        child = self._children.get((engine_idx, metric.key, value))
        if child is None:
            own = [value] if metric.label is not None else []
            labels = [*self.per_engine_labelvalues[engine_idx], *own]
            child = self._children[engine_idx, metric.key, value] = self._families[metric.key].labels(*labels)
        return child


def prometheus_add(histogram: Any, buckets: Buckets) -> None:
    """Observe values that have the count and the sum of each bucket. Whole numbers are observed for a whole sum, as
    large as each other but for 1: floats would not add up to it, and a sum of bytes must be right to the byte.

    prometheus_client has no public call for several observations. One takes a few microseconds.
    """
    bounds = [-math.inf, *buckets.bounds, math.inf]
    for index, (count, total) in enumerate(zip(buckets.counts, buckets.sums, strict=True)):
        rest = float(total)
        for left in range(count, 0, -1):
            value = rest // left if rest.is_integer() and rest // left > bounds[index] else rest / left
            value = min(value, bounds[index + 1])
            histogram.observe(value)
            rest -= value
