"""A real Prometheus scrapes two engines. It accepts the alert rules and every expression of the dashboard."""

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

from bench.servers.load import RequestFailedError, complete, make_prompt
from bench.servers.ports import PortAllocator
from layerpush.apps.files.command import RULE, text_of
from layerpush.core.prefill_identity import PrefillIdentity
from scripts.docgen import dashboard
from tests.e2e.proxyrig import MODEL, SHAPE, get, until
from tests.e2e.servedrig import Served, served
from tests.support.ports import PROMETHEUS_PORTS

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "build/prometheus/usr/bin"
ALERTS = ROOT / "layerpush/apps/files/alerts.yml"
PUSHES, TOKENS = 3, 400
ENGINES_LABELS = {"prefill": {}, "decode": {"namespace": "inference", "pod": "decode-0"}}
"""D has labels as from the Prometheus Operator. P lacks them."""
NOT_HERE = 3
"""The exit status of `scripts/prometheus` where apt-get has no such package."""
patient = pytest.mark.timeout(600)


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
    command = [str(PROGRAMS / "prometheus"), f"--config.file={scratch / 'prometheus.yml'}"]
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
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Both engines have been scraped before and after ``PUSHES`` pushes."""
    done = subprocess.run([ROOT / "scripts" / "prometheus"], capture_output=True, text=True, check=False)
    if done.returncode == NOT_HERE:
        pytest.skip(f"there is no Prometheus here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    scratch = tmp_path_factory.mktemp("prometheus")
    with served(scratch, api_servers=1) as engines, prometheus(scratch, engines) as url:
        running = Scraped(engines, url)
        until(lambda: running.value("count(vllm:layerpush_ranks)") == 2, "both engines are scraped")
        for seed in range(PUSHES):
            engines.push(TOKENS, seed)
        until(lambda: running.value("sum(vllm:layerpush_pushes_total)") == PUSHES, "all pushes are scraped")
        until(lambda: running.value("sum(vllm:layerpush_loads_total)") == PUSHES, "all loads are scraped")
        yield running


def checked(rules: Path) -> subprocess.CompletedProcess[str]:
    """promtool's result for rules."""
    return subprocess.run([PROGRAMS / "promtool", "check", "rules", rules], capture_output=True, text=True, check=False)


@patient
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
def test_every_rule_is_evaluated_without_an_error(scraped: Scraped) -> None:
    names = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

    def rules() -> list[dict[str, Any]]:
        return [rule for group in scraped.ask("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), "every rule has been evaluated")
    assert [rule["name"] for rule in rules()] == names
    assert [(rule["name"], rule["lastError"]) for rule in rules() if rule["health"] != "ok"] == []


@patient
def test_vllms_own_metrics_have_the_same_traffic(scraped: Scraped) -> None:
    until(lambda: scraped.value("sum(vllm:nixl_bytes_transferred_count)") == PUSHES, "vLLM's metrics have all pushes")
    pushed = scraped.value("sum(vllm:layerpush_write_bytes_sum)")
    assert scraped.value("sum(vllm:nixl_bytes_transferred_sum)") == pushed > 0


@patient
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
def test_an_alert_fires_and_names_the_engine(scraped: Scraped) -> None:
    """The last test: P dies while D waits for it."""
    engines = scraped.engines
    prefill = PrefillIdentity(engines.prefill.name, "127.0.0.1", engines.prefill.side_channel_port, tp_size=1)

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            prompt = make_prompt(TOKENS, PUSHES, SHAPE.vocabulary)
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
