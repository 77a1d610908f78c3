"""Metrics of a push through real workers and schedulers, on both engines' ``/metrics``, by vLLM's own way."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from layerpush.core.load_news import LoadCleared, LoadParked
from layerpush.engine import unreported_aborts
from layerpush.prefill.pushes import Pushes
from layerpush.telemetry.metrics.ended_counts import EndedCounts
from tests.connector.engine import LAYERS, STAGING_BYTES, Engine
from tests.connector.test_lifecycle import STEPS, TOKENS, asks_first, ends_well, run
from tests.metrics_front_end import FrontEnd
from tests.metrics_scrape import Scrape
from tests.support.waiting import until
from tests.unit.trace_hosts import first_token

Build = Callable[..., Engine]


@pytest.fixture
def front_end() -> Iterator[FrontEnd]:
    yield FrontEnd(engines=2)
    FrontEnd.close()


def scraped(front_end: FrontEnd, *engines: Engine) -> Scrape:
    """``/metrics`` after all reports of these engines so far. ``front_end`` has their periodic log line."""
    for index, engine in enumerate(engines):
        for payload in engine.stats:
            front_end.hear(payload, index)
        engine.stats.clear()
    return Scrape()


def stock_metrics(scrape: Scrape) -> dict[str, float]:
    """vLLM's own metrics of the first engine's NIXL, by name without the prefix."""
    found = [sample for sample in scrape.samples if sample.labels.get("engine") == "0"]
    return {sample.name.removeprefix("vllm:nixl_"): sample.value for sample in found if "nixl" in sample.name}


def run_dry(engine: Engine) -> None:
    """Step as vLLM's core does: only while the scheduler has requests."""

    def has_none_left() -> bool:
        if engine.scheduler.has_requests():
            engine.step()
        return not engine.scheduler.has_requests()

    until(has_none_left, pause_s=0.004)


def test_a_layerwise_push(engine: Build, front_end: FrontEnd) -> None:
    p, d = engine("kv_producer", {"granularity": "layer"}), engine("kv_consumer", {"first_token": "decode"})
    asks_first(p, d)
    until(lambda: d.step() and scraped(front_end, p, d).value("awaited_loads", engine="1") == 1)
    until(lambda: p.step() and scraped(front_end, p, d).value("pending_registrations", engine="0") == 1)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    ends_well(p, d)
    run_dry(d)

    scrape, counters = scraped(front_end, p, d), p.totals
    assert scrape.value("pushes_total", engine="0", outcome="layerwise") == 1
    assert scrape.value("pushes_total") == 1
    assert scrape.value("layers_total", engine="0", found="hooked") == LAYERS * STEPS
    assert scrape.value("write_bytes_sum", engine="0") == counters.bytes > 0
    assert scrape.value("write_bytes_count", engine="0") == counters.writes
    assert scrape.value("write_descriptors_sum", engine="0") == counters.descriptors
    assert scrape.value("writes_total", engine="0", plan="direct") == scrape.value("writes_total") == counters.writes
    for number, size in (("0", STAGING_BYTES), ("1", 0)):  # D writes nothing
        assert scrape.value("staging_ring_bytes", engine=number) == size
        assert scrape.value("staging_ring_used_bytes", engine=number) == 0
    assert scrape.value("exposed_seconds_count", engine="0") == 1
    assert scrape.value("transfer_seconds_count", engine="0") == 1
    assert scrape.value("transfer_seconds_sum", engine="0") > 0
    assert scrape.value("writer_lag_seconds_count", engine="0") > 0
    assert scrape.value("loads_total", engine="1", outcome="loaded") == 1
    assert scrape.value("loads_total") == 1
    assert scrape.value("load_seconds_count", engine="1") == 1
    for part in ("", "_report", "_schedule", "_first_step"):
        assert scrape.value(f"hand_over{part}_seconds_count", engine="1") == 1
    parts = [scrape.value(f"hand_over_{part}_seconds_sum", engine="1") for part in ("report", "schedule", "first_step")]
    assert sum(parts) == pytest.approx(scrape.value("hand_over_seconds_sum", engine="1"))
    assert min(parts) > 0
    assert scrape.value("ranks", engine="0") == scrape.value("ranks", engine="1") == 1
    for level in ("active_pushes", "unclaimed_pushes", "pending_registrations", "awaited_loads", "parked_requests"):
        assert scrape.value(level) == 0, level
    stock = stock_metrics(scrape)
    assert stock["bytes_transferred_count"] == stock["num_descriptors_count"] == 1
    assert stock["bytes_transferred_sum"] == counters.bytes
    assert stock["num_descriptors_sum"] == counters.descriptors
    assert stock["xfer_time_seconds_sum"] == pytest.approx(scrape.value("transfer_seconds_sum"))
    assert 0 < stock["post_time_seconds_sum"] < stock["xfer_time_seconds_sum"]
    assert stock["num_failed_transfers_total"] == 0
    assert "Layer-wise pushes=1" in (front_end.log_line() or "")


def with_two_ranks(engine: Engine) -> None:
    """From now on a second rank reports the same as the first one in each step."""
    scheduler, update, ranks = engine.connector.connector_scheduler, engine._update, KVOutputAggregator(2)
    scheduler._ended = EndedCounts(2, scheduler.metrics.recorder)

    def update_from_both(output: SchedulerOutput, ready: list[str], result: KVConnectorOutput) -> None:
        reports = [result, pickle.loads(pickle.dumps(result))]
        outputs = [ModelRunnerOutput([], {}, kv_connector_output=report) for report in reports]
        joined = ranks.aggregate(outputs)
        assert joined is not None
        assert joined.kv_connector_output is not None
        update(output, ready, joined.kv_connector_output)

    engine._update = update_from_both


def test_two_ranks_of_an_engine_share_a_push(engine: Build, front_end: FrontEnd) -> None:
    p, d = engine("kv_producer", {"granularity": "layer"}), engine("kv_consumer")
    with_two_ranks(p)
    with_two_ranks(d)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    d.decode_from(p, "r-1", TOKENS)
    ends_well(p, d)
    run_dry(d)
    scrape, counters = scraped(front_end, p, d), p.totals
    assert scrape.value("pushes_total") == scrape.value("pushes_total", outcome="late_registration") == 1
    assert scrape.value("fallbacks_total") == 1
    assert scrape.value("loads_total") == scrape.value("loads_total", outcome="loaded") == 1
    for name in ("exposed", "transfer", "load", "hand_over"):
        assert scrape.value(f"{name}_seconds_count") == 1, name
    assert scrape.value("write_bytes_sum") == 2 * counters.bytes > 0
    assert scrape.value("writes_total") == scrape.value("write_bytes_count") == 2 * counters.writes


def test_dropped_bad_params_are_counted(engine: Build, front_end: FrontEnd) -> None:
    d = engine("kv_consumer")
    d.add("r-1", TOKENS, {"do_remote_prefill": True})
    d.step()
    assert scraped(front_end, d).value("dropped_messages_total", kind="bad_kv_transfer_params") == 1


def test_records_that_the_trace_files_of_both_processes_lack_are_counted(
    engine: Build, front_end: FrontEnd, tmp_path: Path
) -> None:
    d = engine("kv_consumer", {"trace_dir": str(tmp_path)})
    for part in (d.worker.connector_worker, d.connector.connector_scheduler):
        trace = part._trace
        trace.write_record(first_token(request_id="\ud800"))  # not valid JSON
        until(lambda: trace.dropped == 1)  # noqa: B023
    until(lambda: d.step() and scraped(front_end, d).value("dropped_records_total", queue="trace") == 2)


def test_the_scheduler_reports_parked_requests_and_blocks(engine: Build, front_end: FrontEnd) -> None:
    """vLLM drops statistics that a scheduler's connector calls empty. Statistics with a level are not empty."""
    p, d = engine("kv_producer"), engine("kv_consumer")
    d.decode_from(p, "r-1", TOKENS)
    d.step()
    worker = d.worker.connector_worker
    worker._reported.append(LoadParked("r-1", 0))
    worker.failed("r-1")
    until(lambda: d.step() and scraped(front_end, d).value("parked_requests") == 1)
    assert scraped(front_end).value("parked_blocks") == 7
    worker._reported.append(LoadCleared("r-1", 0))
    until(lambda: d.step() and scraped(front_end, d).value("parked_blocks") == 0)
    assert scraped(front_end).value("parked_requests") == 0


@pytest.mark.parametrize("registers", [False, True], ids=["unclaimed", "claimed"])
@pytest.mark.parametrize("attempt", range(3))
def test_an_engine_that_falls_idle_reports_an_aborted_push(
    engine: Build, front_end: FrontEnd, registers: bool, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreported_aborts, "ABORT_REPORT_S", 60.0)  # the writer thread may get no core for seconds
    p = engine("kv_producer", {"granularity": "layer"})
    if registers:
        d = engine("kv_consumer")
        asks_first(p, d)
    p.prefill("r-1", TOKENS)
    p.step()
    p.abort("r-1")
    run_dry(p)
    scrape = scraped(front_end, p)
    assert scrape.value("pushes_total", engine="0", outcome="cancelled") == 1
    assert scrape.value("active_pushes") == scrape.value("unclaimed_pushes") == 0


def test_an_engine_that_falls_idle_reports_an_unclaimed_push(
    engine: Build, front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreported_aborts, "ABORT_REPORT_S", 60.0)
    p = engine("kv_producer", {"kv_lease_duration": 0.2})
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    run_dry(p)
    scrape = scraped(front_end, p)
    assert scrape.value("pushes_total", engine="0", outcome="unclaimed") == 1
    assert scrape.value("active_pushes") == scrape.value("unclaimed_pushes") == 0


def test_an_endless_push_does_not_keep_the_engine_stepping(engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    p = engine("kv_producer")
    monkeypatch.setattr(unreported_aborts, "ABORT_REPORT_S", 2.0)
    monkeypatch.setattr(Pushes, "is_draining", True)
    p.prefill("r-1", TOKENS)
    p.step()
    p.abort("r-1")
    p.step()
    assert p.scheduler.has_requests()
    run_dry(p)
