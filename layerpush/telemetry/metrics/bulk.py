"""Many observations into a Prometheus histogram at once."""

from __future__ import annotations

from typing import Any

from layerpush.telemetry.metrics.tally import Buckets


def observe_buckets(histogram: Any, buckets: Buckets) -> None:
    """Add many observations at once. Counts and sum come out exact.

    prometheus_client has no public way to do so; what it does on ``observe`` is done here once per bucket. Other
    classes in its place (vLLM's for Ray) are told of each observation, all of a bucket as their mean.
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
