"""From a worker's delta to a scrape and a log line, through vLLM's own aggregation, serialisation and registry."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest, multiprocess, values
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from layerpush.compat.prometheus import prometheus_add
from layerpush.compat.stats import KEY, LayerPushStats, TransferStats
from layerpush.connector import LayerwisePushConnector
from layerpush.telemetry.metrics.catalog import (
    CATALOG,
    DROPPED_MESSAGES,
    EXPOSED,
    FALLBACKS,
    LAYERS_READY,
    LOAD,
    LOADS,
    PARKED_BLOCKS,
    PENDING_REGISTRATIONS,
    PUSHES,
    TRANSFER,
    WRITE_BYTES,
    WRITE_DESCRIPTORS,
    WRITE_LAYERS,
    WRITER_LAG,
    Kind,
)
from layerpush.telemetry.metrics.metric_delta import Buckets, MetricDelta
from layerpush.telemetry.trace_records import WriteSums
from tests.metrics_front_end import FrontEnd
from tests.metrics_scrape import Scrape

Opened = Callable[..., FrontEnd]


@pytest.fixture
def front_end() -> Iterator[Opened]:
    yield FrontEnd
    FrontEnd.close()


def stats_of(delta: MetricDelta, stock: Any = None) -> LayerPushStats:
    stats = LayerPushStats.joined(stock, delta)
    assert stats is not None
    return stats


def pushed(rank: str = "0", seconds: float = 0.02) -> MetricDelta:
    """One layer-wise push of two WRITEs."""
    delta = MetricDelta()
    delta.count(PUSHES, "layerwise")
    delta.count(LAYERS_READY, "hooked", 8)
    delta.observe(EXPOSED, seconds)
    delta.observe(TRANSFER, 3 * seconds)
    for size in (1 << 20, 3 << 20):
        delta.observe(WRITE_BYTES, size)
        delta.observe(WRITE_DESCRIPTORS, 16)
        delta.observe(WRITE_LAYERS, 4)
    delta.level(PENDING_REGISTRATIONS, rank, 2)
    return delta


def stock_stats() -> Any:
    """vLLM's statistics of one whole WRITE of 1 MiB."""
    stats = LayerPushStats()
    for key, value in (
        ("transfer_duration", 0.5),
        ("post_duration", 0.1),
        ("bytes_transferred", 1 << 20),
        ("num_descriptors", 4),
    ):
        stats.data[key].append(value)
    return stats


def test_every_metric_exists_before_the_first_event(front_end: Opened) -> None:
    front_end()
    scrape = Scrape()
    for metric in CATALOG:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        assert {metric.exposed_name + suffix for suffix in suffixes} <= scrape.names
        if metric.label is not None:
            assert scrape.label_values(metric.exposed_name, metric.label) == set(metric.values)
    assert all(
        sample.value == 0 for sample in scrape.samples if "layerpush" in sample.name and "_created" not in sample.name
    )


def test_worker_reports_are_scraped(front_end: Opened) -> None:
    one = front_end()
    for _ in range(2):
        one.hear(stats_of(pushed()).to_dict())
    scrape = Scrape()
    assert scrape.value("pushes_total", outcome="layerwise") == 2
    assert scrape.value("pushes_total", outcome="failed") == 0
    assert scrape.value("layers_total", found="hooked") == 16
    assert scrape.value("exposed_seconds_count") == 2
    assert scrape.value("exposed_seconds_sum") == pytest.approx(0.04)
    assert scrape.value("exposed_seconds_bucket", le="0.01") == 0
    assert scrape.value("exposed_seconds_bucket", le="0.025") == 2
    assert scrape.value("write_bytes_sum") == 8 << 20
    assert scrape.value("write_bytes_count") == 4
    assert scrape.value("pending_registrations") == 2


def test_each_engine_has_its_own_series(front_end: Opened) -> None:
    both = front_end(engines=2)
    both.hear(stats_of(pushed()).to_dict(), engine=1)
    scrape = Scrape()
    assert scrape.value("pushes_total", engine="0") == 0
    assert scrape.value("pushes_total", engine="1") == 1
    assert scrape.value("pending_registrations", engine="0") == 0


def test_ranks_add_up_as_in_vllm(front_end: Opened) -> None:
    """Through the executor's aggregator, with a rank without a report and the scheduler's own report."""
    reports = [None, stats_of(pushed("1")), stats_of(pushed("2", 0.5), stock_stats())]
    reports = pickle.loads(pickle.dumps(reports))  # from worker to engine core
    outputs = [
        ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_stats=report))
        for report in reports
    ]
    output = KVOutputAggregator(len(outputs)).aggregate(outputs, 0)
    assert output is not None
    assert output.kv_connector_output is not None
    total = output.kv_connector_output.kv_connector_stats
    assert total is not None
    own = MetricDelta()
    own.level(PARKED_BLOCKS, "scheduler", 7)
    front_end().hear(total.aggregate(stats_of(own)).to_dict())
    scrape = Scrape()
    assert scrape.value("pushes_total") == 2
    assert scrape.value("exposed_seconds_sum") == pytest.approx(0.52)
    assert scrape.value("pending_registrations") == 2, "both ranks mean the same two"
    assert scrape.value("parked_blocks") == 7
    assert {s.name: s.value for s in Scrape().samples}["vllm:nixl_bytes_transferred_sum"] == 1 << 20


def test_layer_wise_pushes_count_as_vllm_transfers(front_end: Opened) -> None:
    stats, transfers = LayerPushStats(), TransferStats()
    transfers.pushed(WriteSums(bytes=3 << 20, descriptors=48, post_s=0.002), transfer_s=0.25)
    transfers.write_landed(SimpleNamespace(xferDuration=5e5, postDuration=1e3, totalBytes=1 << 20, descCount=4))
    transfers.failed()
    for _ in range(2):  # the second time there is nothing to feed
        transfers.feed(stats)
    one = front_end()
    one.hear(stats.to_dict())
    found = {sample.name.removeprefix("vllm:nixl_"): sample.value for sample in Scrape().samples}
    assert found["bytes_transferred_count"] == found["num_descriptors_count"] == 2
    assert found["bytes_transferred_sum"] == 4 << 20
    assert found["num_descriptors_sum"] == 52
    assert found["xfer_time_seconds_sum"] == pytest.approx(0.75)
    assert found["post_time_seconds_sum"] == pytest.approx(0.003)
    assert found["num_failed_transfers_total"] == 1
    assert "Num successful transfers=2" in (one.log_line() or "")


def test_aggregation_does_not_change_its_argument() -> None:
    first, second = stats_of(pushed(), stock_stats()), stats_of(pushed("1"), stock_stats())
    before = repr(second.to_dict())
    first.aggregate(second).aggregate(second)
    assert repr(second.to_dict()) == before
    assert first.delta.counted(PUSHES) == 3
    assert len(first.data["transfer_duration"]) == 3


def test_an_unknown_kind_of_message_is_counted(front_end: Opened) -> None:
    delta = MetricDelta()
    delta.count(DROPPED_MESSAGES, "from_the_future", 3)
    front_end().hear(stats_of(delta).to_dict())
    assert Scrape().value("dropped_messages_total", kind="from_the_future") == 3


def test_empty_statistics() -> None:
    empty = LayerwisePushConnector.build_kv_connector_stats()
    assert empty.is_empty()
    assert empty.delta.is_empty
    assert LayerPushStats.joined(None, None) is None
    stock_only = LayerPushStats.joined(stock_stats(), None)
    assert stock_only is not None
    assert not stock_only.is_empty()
    assert stock_only.data[KEY] == MetricDelta().to_data()
    empty.aggregate(stats_of(pushed()))
    empty.reset()
    assert empty.is_empty()


def test_metrics_work_under_multi_connector(front_end: Opened) -> None:
    inner = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_both"}
    one = front_end(connector="MultiConnector", connectors=[inner])
    one.hear({"LayerwisePushConnector": stats_of(pushed()).to_dict()})
    assert Scrape().value("pushes_total") == 1
    assert "Layer-wise pushes" in (one.log_line() or "")


# vLLM's periodic log line.


def test_the_log_line_sums_an_interval_up(front_end: Opened) -> None:
    one = front_end()
    failed = MetricDelta()
    failed.count(PUSHES, "failed")
    failed.count(FALLBACKS, "short_prompt")
    for delta in (pushed(), pushed(), failed):
        one.hear(stats_of(delta).to_dict())
    line = one.log_line() or ""
    assert line.startswith("KV Transfer metrics: Layer-wise pushes=2, Whole pushes=0, Fallbacks=1, Failed pushes=1")
    assert "Avg exposed time (ms)=20.0" in line
    assert "WRITEs=4, MiB pushed=8.0" in line
    assert "Avg layers per WRITE=4.0" in line
    assert "Num successful transfers" not in line, "vLLM pushed nothing"
    assert one.log_line() is None, "the next interval starts empty"


def test_the_log_line_of_a_decode_engine(front_end: Opened) -> None:
    one, delta = front_end(), MetricDelta()
    delta.count(LOADS, "loaded", 3)
    delta.count(LOADS, "parked")
    delta.observe(LOAD, 0.3)
    delta.level(PARKED_BLOCKS, "scheduler", 7)
    one.hear(stats_of(delta).to_dict())
    line = one.log_line() or ""
    assert "Loads=3, Loads not done=1" in line
    assert "Parked blocks=7" in line
    assert "pushes" not in line


def test_levels_and_lag_alone_are_scraped_and_not_logged(front_end: Opened) -> None:
    one, delta = front_end(), MetricDelta()
    delta.level(PENDING_REGISTRATIONS, "0", 4)
    delta.observe(WRITER_LAG, 0.001)
    one.hear(stats_of(delta).to_dict())
    assert one.log_line() is None
    assert Scrape().value("pending_registrations") == 4
    assert Scrape().value("writer_lag_seconds_count") == 1


def test_a_report_of_levels_only_is_not_empty() -> None:
    """vLLM drops an empty report of a scheduler's connector."""
    delta = MetricDelta()
    delta.level(PARKED_BLOCKS, "scheduler", 0)
    assert not stats_of(delta).is_empty()


def test_two_loggers_get_equal_reports(front_end: Opened) -> None:
    """vLLM gives one dict to all loggers, step by step."""
    one = front_end()
    other = KVConnectorLogging(one.transfer)
    payloads = [stats_of(pushed(), stock_stats()).to_dict() for _ in range(3)]
    for payload in payloads:
        other.observe(payload)
        one.logging.observe(payload)
    lines: list[str] = []
    other.log(lambda form, text: lines.append(form % text))
    assert lines == [one.log_line()]
    assert "Layer-wise pushes=3" in lines[0]
    assert "Num successful transfers=3" in lines[0]


# Many observations at once.


class OnlyObserves:
    """A histogram: prometheus_client's, or vLLM's for Ray."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.into = Buckets.empty(bounds)

    def observe(self, value: float) -> None:
        self.into.observe(value)


def test_a_histogram_gets_every_observation() -> None:
    buckets = Buckets.empty((0.1, 0.3))
    for value in (0.1, 0.1, 0.1, 0.2, 7.0, 9.0):
        buckets.observe(value)
    other = OnlyObserves((0.1, 0.3))
    prometheus_add(other, buckets)
    assert other.into.counts == buckets.counts == [3, 1, 2]
    assert other.into.total == pytest.approx(buckets.total)


@example([1, 1, 1, 1, 1, 2])  # six times 7 / 6 is more than 7
@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=50))
def test_a_sum_of_bytes_is_right_to_the_byte(sizes: list[int]) -> None:
    bounds = (4096.0, float(1 << 20), float(1 << 30))
    buckets, other = Buckets.empty(bounds), OnlyObserves(bounds)
    for size in sizes:
        buckets.observe(size)
    prometheus_add(other, buckets)
    assert other.into.counts == buckets.counts
    assert other.into.total == sum(sizes)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CollectorRegistry:
    """prometheus_client keeps its values in files from now on, as in several front ends. All that they have."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue())
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return registry


def test_metrics_work_with_several_front_ends(several: CollectorRegistry, front_end: Opened) -> None:
    one = front_end()
    for reports in (0, 2):
        for _ in range(reports):
            one.hear(stats_of(pushed()).to_dict())
        scrape = Scrape(generate_latest(several).decode())
        for metric in CATALOG:
            suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
            assert {metric.exposed_name + suffix for suffix in suffixes} <= scrape.names
        assert scrape.value("pushes_total", outcome="layerwise") == reports
        assert scrape.value("exposed_seconds_bucket", le="0.01") == 0
        assert scrape.value("exposed_seconds_bucket", le="0.025") == scrape.value("exposed_seconds_count") == reports
        assert scrape.value("exposed_seconds_sum") == pytest.approx(0.02 * reports)
        assert scrape.value("pending_registrations") == reports
