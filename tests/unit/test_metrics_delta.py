"""Sums of metrics: over events, over reports, over ranks, and between processes."""

from __future__ import annotations

import itertools
import math
import random
import re

import msgspec
import pytest

from layerpush.telemetry.metrics.catalog import (
    BY_KEY,
    CATALOG,
    EXPOSED,
    FAILED_WRITES,
    LOADS,
    PENDING_REGISTRATIONS,
    PUSHES,
    WRITE_BYTES,
    Kind,
)
from layerpush.telemetry.metrics.metric_delta import MAX_LABEL_VALUES, OTHER, Buckets, MetricDelta


def sample(seed: int) -> MetricDelta:
    dice, delta = random.Random(seed), MetricDelta()
    for _ in range(50):
        delta.count(PUSHES, dice.choice(list(PUSHES.values)))
        delta.count(FAILED_WRITES)
        delta.observe(EXPOSED, dice.expovariate(10.0))
    delta.level(PENDING_REGISTRATIONS, f"rank {seed}", seed)
    return delta


def merged(*tallies: MetricDelta) -> MetricDelta:
    total = MetricDelta()
    for delta in tallies:
        total.merge(delta.to_data())
    return total


def test_ranks_add_up_in_any_order() -> None:
    a, b, c = (sample(seed) for seed in range(3))
    left, right = merged(merged(a, b), c), merged(c, merged(b, a))
    assert left.counters == right.counters
    assert left.gauges == right.gauges
    assert left.observed(EXPOSED).counts == right.observed(EXPOSED).counts
    assert left.observed(EXPOSED).total == pytest.approx(right.observed(EXPOSED).total)
    assert left.counted(PUSHES) == left.counted(FAILED_WRITES) == left.observed(EXPOSED).count == 150


def test_a_merge_does_not_change_its_argument() -> None:
    data = sample(1).to_data()
    before = msgspec.json.encode(data)
    total = MetricDelta.from_data(data)
    total.merge(sample(2).to_data())
    total.level(PENDING_REGISTRATIONS, "rank 1", 99)
    assert msgspec.json.encode(data) == before


def test_data_survives_msgpack() -> None:
    """vLLM sends it in MessagePack, decoded without a type."""
    data = sample(3).to_data()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(data)) == data


def test_data_does_not_grow_with_observations() -> None:
    once, often = merged(sample(1)), merged(*(sample(1) for _ in range(200)))
    size_once, size_often = (len(msgspec.msgpack.encode(delta.to_data())) for delta in (once, often))
    assert size_often < 2 * size_once


def test_a_gauge_keeps_the_newest_level_of_each_reporter() -> None:
    """Every rank counts every request, so the ranks' levels are not added up."""
    total = MetricDelta()
    for reporter, level in (("0", 3), ("1", 4), ("1", 2)):
        update = MetricDelta()
        update.level(PENDING_REGISTRATIONS, reporter, level)
        total.merge(update.to_data())
    assert total.highest(PENDING_REGISTRATIONS) == 3


def test_label_values_are_bounded() -> None:
    delta = MetricDelta()
    for number in range(10 * MAX_LABEL_VALUES):
        delta.count(LOADS, f"outcome {number}")
    assert len(delta.counters[LOADS.key]) == MAX_LABEL_VALUES + 1
    assert delta.counters[LOADS.key][OTHER] == 9 * MAX_LABEL_VALUES
    assert delta.counted(LOADS) == 10 * MAX_LABEL_VALUES


def test_a_count_of_zero_leaves_the_tally_empty() -> None:
    delta = MetricDelta()
    delta.count(PUSHES, "failed", 0)
    assert delta.is_empty


def test_a_bucket_includes_its_upper_bound() -> None:
    """As in Prometheus, where a bucket includes its bound."""
    buckets = Buckets.empty((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1):
        buckets.observe(value)
    assert (buckets.counts, buckets.sums) == ([2, 2, 1], [1.0, 3.5, 2.1])


def test_negative_observations_become_zero() -> None:
    delta = MetricDelta()
    delta.observe(EXPOSED, -1e-9)
    assert delta.observed(EXPOSED).total == 0.0


@pytest.mark.parametrize("part", [0.5, 0.9, 0.99])
def test_quantiles_are_exact_to_one_bucket(part: float) -> None:
    dice, buckets = random.Random(7), Buckets.empty(EXPOSED.buckets)
    values = sorted(dice.expovariate(20.0) for _ in range(1000))
    for value in values:
        buckets.observe(value)
    exact = values[math.ceil(part * len(values)) - 1]
    bounds = (0.0, *EXPOSED.buckets)
    (low, high) = next((a, b) for a, b in itertools.pairwise(bounds) if a < exact <= b)
    assert low <= buckets.quantile(part) <= high


def test_quantiles_of_no_values_and_of_values_beyond_the_last_bound() -> None:
    buckets = Buckets.empty((1.0,))
    assert (buckets.quantile(0.9), buckets.mean) == (0.0, 0.0)
    buckets.observe(9.0)
    buckets.observe(11.0)
    assert (buckets.quantile(0.9), buckets.mean) == (10.0, 10.0)


def test_the_catalogue_is_sound() -> None:
    assert len(BY_KEY) == len(CATALOG)
    for metric in CATALOG:
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.key)
        assert not metric.key.endswith(("_total", "_count", "_sum", "_bucket"))
        assert bool(metric.label) == bool(metric.values)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.kind is Kind.COUNTER or metric.label is None
        assert metric.meaning.endswith(".")
    assert WRITE_BYTES.name == "vllm:layerpush_write_bytes"
    assert PUSHES.exposed_name == "vllm:layerpush_pushes_total"
