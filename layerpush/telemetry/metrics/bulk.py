"""Adds many observations to a Prometheus histogram at once."""

from __future__ import annotations

from typing import Any

from layerpush.telemetry.metrics.tally import Buckets


def observe_buckets(histogram: Any, buckets: Buckets) -> None:
    """Add all observations of ``buckets``. The histogram's counts and sum are exact.

    prometheus_client has no public function for this, so this repeats its ``observe`` once per bucket. Other classes
    (vLLM's for Ray) get one ``observe`` for each observation, with the mean of its bucket.
    """
    slots: Any = getattr(histogram, "_buckets", None)
    total: Any = getattr(histogram, "_sum", None)
    if isinstance(slots, list) and len(slots) == len(buckets.counts) and hasattr(total, "inc"):
        for slot, count in zip(slots, buckets.counts, strict=True):
            if count:
                slot.inc(count)
        total.inc(buckets.total)
        return
    for index, count in enumerate(buckets.counts):
        if count:
            mean = buckets.sums[index] / count
            if index < len(buckets.bounds):
                mean = min(mean, buckets.bounds[index])
            for _ in range(count):
                histogram.observe(mean)
