"""``GET /metrics`` and the log of `vllm serve`, of a P with one or two API servers and of a D. A real Prometheus reads
them: it accepts the alert rules and every expression of the dashboard.

The order of the tests matters: Prometheus counts the first pushes, and the last test ends P.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from bench.servers.engines import EngineServer
from bench.servers.load import RequestFailedError, complete, make_prompt
from bench.servers.ports import PortAllocator
from layerpush.apps.files.command import RULE, text_of
from layerpush.core.prefill_identity import PrefillIdentity
from layerpush.telemetry.metrics.catalog import CATALOG, PUSHES, Kind
from scripts.docgen import dashboard
from tests.e2e.proxyrig import MODEL, SHAPE, get, until
from tests.e2e.servedrig import Served, scrape, served, wait_for
from tests.metrics_named import ALERTS, DASHBOARD, expressions, unknown_names
from tests.support.ports import PROMETHEUS_PORTS
from tests.support.scripts import made_by

SCRAPED, TOKENS = 3, 400
ENGINES_LABELS = {"prefill": {}, "decode": {"namespace": "inference", "pod": "decode-0"}}
"""D has labels as from the Prometheus Operator. P lacks them."""
patient = pytest.mark.timeout(900)
every_number = pytest.mark.parametrize(
    "servers", [1, pytest.param(2, marks=pytest.mark.exhaustive)], ids="API servers: {}".format, indirect=True
)
one = pytest.mark.parametrize("servers", [1], indirect=True)


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), request.param) as running:
        yield running


def outcomes(engine: EngineServer) -> dict[str, float]:
    found = scrape(engine)
    return {outcome: found.value("pushes_total", outcome=outcome) for outcome in PUSHES.values}


def both(servers: Served) -> tuple[EngineServer, EngineServer]:
    return servers.prefill, servers.decode


@patient
@every_number
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


@dataclass(frozen=True)
class Scraped:
    engines: Served
    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """The data in an answer of Prometheus' HTTP API."""
        status, body = get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        assert status == 200, body
        answer = json.loads(body)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression's present value."""
        return list(self.ask("query", query=expression)["result"])

    def value(self, expression: str) -> float:
        """The value of one series; NaN if there is none yet."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else float("nan")


@contextlib.contextmanager
def prometheus(scratch: Path, engines: Served) -> Iterator[str]:
    """The URL of a ready Prometheus with our rules as they are. It scrapes once a second."""
    places = {"prefill": engines.prefill, "decode": engines.decode}
    targets = [
        {"targets": [engine.url.removeprefix("http://")], "labels": ENGINES_LABELS[role]}
        for role, engine in places.items()
    ]
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "vllm", "static_configs": targets}],
    }
    (scratch / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{PortAllocator(PROMETHEUS_PORTS).next_free()}"
    command = [str(made_by("prometheus") / "usr/bin/prometheus"), f"--config.file={scratch / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={scratch / 'data'}", f"--web.listen-address={address}"]
    with (scratch / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: get(f"http://{address}/-/ready")[0] == 200, "Prometheus is ready")
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def scraped(servers: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Both engines have been scraped before and after ``SCRAPED`` pushes."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), servers) as url:
        running = Scraped(servers, url)
        until(lambda: running.value("count(vllm:layerpush_ranks)") == 2, "both engines are scraped")
        for seed in range(SCRAPED):
            servers.push(TOKENS, seed)
        until(lambda: running.value("sum(vllm:layerpush_pushes_total)") == SCRAPED, "all pushes are scraped")
        until(lambda: running.value("sum(vllm:layerpush_loads_total)") == SCRAPED, "all loads are scraped")
        yield running


def checked(rules: Path) -> subprocess.CompletedProcess[str]:
    """promtool's result for rules."""
    promtool = made_by("prometheus") / "usr/bin/promtool"
    return subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True, check=False)


@patient
@one
@pytest.mark.usefixtures("scraped")
def test_promtool_accepts_the_rules_and_rejects_a_bad_one(tmp_path: Path) -> None:
    done = checked(ALERTS)
    assert done.returncode == 0, done.stderr
    operators = tmp_path / "spec.yml"
    operators.write_text(yaml.safe_dump(yaml.safe_load(text_of(RULE))["spec"]))
    assert checked(operators).returncode == 0
    bad = tmp_path / "bad.yml"
    bad.write_text(ALERTS.read_text().replace("> 0.01", "> ", 1))
    assert checked(bad).returncode == 1


@patient
@one
def test_every_rule_is_evaluated_without_an_error(scraped: Scraped) -> None:
    names = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

    def rules() -> list[dict[str, Any]]:
        return [rule for group in scraped.ask("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), "every rule has been evaluated")
    assert [rule["name"] for rule in rules()] == names
    assert [(rule["name"], rule["lastError"]) for rule in rules() if rule["health"] != "ok"] == []


@patient
@one
def test_vllms_own_metrics_have_the_same_traffic(scraped: Scraped) -> None:
    until(lambda: scraped.value("sum(vllm:nixl_bytes_transferred_count)") == SCRAPED, "vLLM's metrics have all pushes")
    pushed = scraped.value("sum(vllm:layerpush_write_bytes_sum)")
    assert scraped.value("sum(vllm:nixl_bytes_transferred_sum)") == pushed > 0


@patient
@one
@pytest.mark.parametrize("namespace", [".*", "inference"])
def test_every_panel_has_data(scraped: Scraped, namespace: str) -> None:
    """For both engines, and for those in a namespace."""
    chosen = dict.fromkeys(dashboard.VARIABLES, ".*") | {"namespace": namespace}
    expressions = [line for row in dashboard.ROWS.values() for panel in row for line in panel.lines.values()]
    assert len(expressions) > 40
    for expression in expressions:
        asked = expression.replace("$__rate_interval", "1m")
        for label, value in chosen.items():
            asked = asked.replace(f"${label}", value)
        assert scraped.query(asked), asked
    engines = scraped.query(f'vllm:layerpush_ranks{{namespace=~"{namespace}"}}')
    assert len(engines) == (2 if namespace == ".*" else 1)


@patient
@every_number
def test_pushes_are_counted_on_both_sides_although_both_fall_idle(servers: Served) -> None:
    p, d = both(servers)
    pushed, loaded = sum(outcomes(p).values()), scrape(d).value("loads_total", outcome="loaded")
    servers.push(TOKENS, seed=11)  # P and D connect first: the registration may come late
    until(lambda: sum(outcomes(p).values()) == pushed + 1, "its push is over")
    before, pushes = scrape(p), 3
    first = outcomes(p)
    exposed, size = before.value("exposed_seconds_count"), before.value("write_bytes_sum")
    loaded += 1
    wait_for(d, "loads_total", loaded, outcome="loaded")
    for number in range(pushes):
        servers.push(TOKENS, seed=20 + number)
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
@every_number
def test_an_aborted_push_is_reported_although_p_falls_idle_at_once(servers: Served) -> None:
    p = servers.prefill
    cancelled = scrape(p).value("pushes_total", outcome="cancelled")
    servers.leave_prefill(4000, seed=50)
    wait_for(p, "pushes_total", cancelled + 1, outcome="cancelled")
    wait_for(p, "active_pushes", 0)


@patient
@every_number
def test_the_periodic_log_line_has_the_loads(servers: Served) -> None:
    """D has one API server: with several, vLLM logs no statistics at all."""
    servers.push(TOKENS, seed=60)
    log = servers.decode.log_path
    until(lambda: "KV Transfer metrics: Loads=" in log.read_text(errors="replace"), "D's log line")


@patient
@one
def test_an_alert_fires_and_names_the_engine(scraped: Scraped) -> None:
    """The last test: P dies while D waits for it."""
    engines = scraped.engines
    prefill = PrefillIdentity(engines.prefill.name, "127.0.0.1", engines.prefill.side_channel_port, tp_size=1)

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            prompt = make_prompt(TOKENS, SCRAPED, SHAPE.vocabulary)
            asking = asyncio.create_task(
                complete(session, engines.decode, prompt, 1, kv_transfer_params=prefill.to_decode("unasked"))
            )
            waiting = 'vllm:layerpush_awaited_loads{pod="decode-0"}'
            await asyncio.to_thread(until, lambda: scraped.value(waiting) == 1, "D waits for P")
            engines.prefill.signal(signal.SIGKILL)
            with contextlib.suppress(RequestFailedError):
                await asking

    def alerts() -> list[dict[str, Any]]:
        return [alert for alert in scraped.ask("alerts")["alerts"] if alert["state"] == "firing"]

    assert alerts() == []
    asyncio.run(ask())
    until(alerts, "an alert fires")
    (alert,) = alerts()
    instance = engines.decode.url.removeprefix("http://")
    assert alert["labels"] == {
        "alertname": "LayerpushPeerLost",
        "severity": "warning",
        "how": alert["labels"]["how"],
        "model_name": MODEL,
        "job": "vllm",
        "instance": instance,
        **ENGINES_LABELS["decode"],
    }
    assert alert["annotations"]["summary"].startswith(f"{instance} gave up waiting for a prefill engine")
