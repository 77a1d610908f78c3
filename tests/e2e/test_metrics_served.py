"""``GET /metrics`` and the log of `vllm serve`, of a P with one or two API servers and of a D."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from bench.servers.engines import Engine
from layerpush.telemetry.metrics.catalog import CATALOG, PUSHES, Kind
from tests.e2e.proxyrig import MODEL, SHAPE, until
from tests.e2e.servedrig import Served, scrape, served, wait_for
from tests.metrics_named import ALERTS, DASHBOARD, expressions, unknown_names

TOKENS = 400
patient = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)], ids="API servers: {}".format)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), request.param) as running:
        yield running


def outcomes(engine: Engine) -> dict[str, float]:
    found = scrape(engine)
    return {outcome: found.value("pushes_total", outcome=outcome) for outcome in PUSHES.values}


def both(servers: Served) -> tuple[Engine, Engine]:
    return servers.prefill, servers.decode


@patient
def test_every_metric_of_the_dashboard_and_the_alerts_exists_at_the_start(servers: Served) -> None:
    documents = json.loads(DASHBOARD.read_text()), yaml.safe_load(ALERTS.read_text())
    for engine in both(servers):
        found = scrape(engine)
        for metric in CATALOG:
            suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
            assert {metric.exposed_name + suffix for suffix in suffixes} <= found.names, engine.name
        for document in documents:
            assert unknown_names(expressions(document), found) == [], engine.name
        labels = [sample.labels for sample in found.samples if sample.name == "vllm:layerpush_pushes_total"]
        assert {(each["model_name"], each["engine"]) for each in labels} == {(MODEL, "0")}
        assert "vllm:nixl_bytes_transferred_sum" in found.names, "vLLM's metrics must stay"


@patient
def test_pushes_are_counted_on_both_sides_although_both_fall_idle(servers: Served) -> None:
    p, d = both(servers)
    servers.push(TOKENS, seed=1)  # P and D connect first: the registration may come late
    until(lambda: sum(outcomes(p).values()) == 1, "its push is over")
    before, pushes = scrape(p), 3
    first = outcomes(p)
    exposed, size = before.value("exposed_seconds_count"), before.value("write_bytes_sum")
    wait_for(d, "loads_total", 1, outcome="loaded")
    loaded = scrape(d).value("loads_total", outcome="loaded")
    for number in range(pushes):
        servers.push(TOKENS, seed=10 + number)
    until(lambda: sum(outcomes(p).values()) == sum(first.values()) + pushes, "all are counted")
    counted = {outcome: count - first[outcome] for outcome, count in outcomes(p).items() if count != first[outcome]}
    assert counted.keys() <= {"layerwise", "late_registration"}, "a busy machine may bring D's registration late"
    wait_for(d, "loads_total", loaded + pushes, outcome="loaded")
    after = scrape(p)
    block = 32
    assert after.value("write_bytes_sum") == size + pushes * -(-TOKENS // block) * block * SHAPE.kv_bytes_per_token
    assert after.value("writes_total") == after.value("write_bytes_count") > 0, "by any plan"
    assert after.value("exposed_seconds_count") == exposed + pushes
    for engine in both(servers):
        assert scrape(engine).value("ranks") == 1
        for level in ("active_pushes", "unclaimed_pushes", "pending_registrations", "awaited_loads", "parked_blocks"):
            wait_for(engine, level, 0)


@patient
def test_an_aborted_push_is_reported_although_p_falls_idle_at_once(servers: Served) -> None:
    p = servers.prefill
    cancelled = scrape(p).value("pushes_total", outcome="cancelled")
    servers.leave_prefill(4000, seed=50)
    wait_for(p, "pushes_total", cancelled + 1, outcome="cancelled")
    wait_for(p, "active_pushes", 0)


@patient
def test_the_periodic_log_line_has_the_loads(servers: Served) -> None:
    """D has one API server: with several, vLLM logs no statistics at all."""
    servers.push(TOKENS, seed=60)
    log = servers.decode.log_path
    until(lambda: "KV Transfer metrics: Loads=" in log.read_text(errors="replace"), "D's log line")
