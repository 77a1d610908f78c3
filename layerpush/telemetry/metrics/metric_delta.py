"""Counters, histograms and gauges of any number of events and ranks, in bounded memory. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerpush.telemetry.metrics.catalog import BY_KEY, NO_LABEL, Metric

MAX_LABEL_VALUES = 128
OTHER = "other"


@dataclass(slots=True)
class Buckets:
    """A histogram: the number and the sum of the observations in each bucket. The last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    sums: list[float]

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Buckets:
        return cls(bounds, [0] * (len(bounds) + 1), [0.0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        index = bisect_left(self.bounds, value)
        self.counts[index] += 1
        self.sums[index] += value

    def merge(self, counts: Sequence[int], sums: Sequence[float]) -> None:
        for index, (count, total) in enumerate(zip(counts, sums, strict=True)):
            self.counts[index] += count
            self.sums[index] += total

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def total(self) -> float:
        return sum(self.sums)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """The value below which this part (0 to 1) of the observations lies, exact to a bucket's width."""
        wanted, below = part * self.count, 0
        for index, count in enumerate(self.counts):
            if count and below + count >= wanted:
                if index == len(self.bounds):
                    return self.sums[index] / count
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * (wanted - below) / count
            below += count
        return 0.0


@dataclass(slots=True)
class MetricDelta:
    """Counters by key and label value, histograms by key, gauges by key and reporter.

    One thread at a time may use it. ``to_data`` returns plain dicts, lists, numbers and strings for another process;
    ``merge`` adds such data of another rank or a later time. A gauge keeps the newest level of each reporter.
    """

    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)

    def count(self, metric: Metric, value: str = NO_LABEL, number: int = 1) -> None:
        """``value`` is the label's value, if there is a label. Values beyond ``MAX_LABEL_VALUES`` count as "other"."""
        if not number:
            return
        values = self.counters.setdefault(metric.key, {})
        if value not in values and len(values) >= MAX_LABEL_VALUES:
            value = OTHER
        values[value] = values.get(value, 0) + number

    def observe(self, metric: Metric, value: float) -> None:
        """``value`` is in the metric's own unit; a negative one counts as 0."""
        self._buckets(metric.key).observe(max(0.0, value))

    def level(self, metric: Metric, reporter: str, value: float) -> None:
        self.gauges.setdefault(metric.key, {})[reporter] = value

    def counted(self, metric: Metric, *values: str) -> int:
        """The sum over these label values, or over all."""
        known = self.counters.get(metric.key, {})
        return sum(known.get(value, 0) for value in values or known)

    def observed(self, metric: Metric) -> Buckets:
        return self.histograms.get(metric.key) or Buckets.empty(metric.buckets)

    def highest(self, metric: Metric) -> float:
        """The highest level of a gauge. All reporters see the same requests, so their levels are not added up."""
        return max(self.gauges.get(metric.key, {}).values(), default=0.0)

    @property
    def is_empty(self) -> bool:
        return not (self.counters or self.histograms or self.gauges)

    def merge(self, data: Mapping[str, Any]) -> None:
        """Add a copy of another delta's ``to_data``."""
        for key, values in data.get("counters", {}).items():
            for value, number in values.items():
                self.count(BY_KEY[key], value, number)
        for key, (counts, sums) in data.get("histograms", {}).items():
            self._buckets(key).merge(counts, sums)
        for key, levels in data.get("gauges", {}).items():
            self.gauges.setdefault(key, {}).update(levels)

    def to_data(self) -> dict[str, Any]:
        return {
            "counters": {key: dict(values) for key, values in self.counters.items()},
            "histograms": {key: [list(of.counts), list(of.sums)] for key, of in self.histograms.items()},
            "gauges": {key: dict(levels) for key, levels in self.gauges.items()},
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> MetricDelta:
        delta = cls()
        delta.merge(data)
        return delta

    def _buckets(self, key: str) -> Buckets:
        buckets = self.histograms.get(key)
        if buckets is None:
            buckets = self.histograms[key] = Buckets.empty(BY_KEY[key].buckets)
        return buckets
