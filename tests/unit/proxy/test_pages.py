"""The proxy's pages name existing things, and their examples work as described."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import layerpush.apps.proxy.server
from layerpush.apps.cli import app
from layerpush.apps.proxy.core import Proxy
from layerpush.apps.proxy.discovery import read_engines_file
from layerpush.apps.proxy.identity import Identity
from layerpush.apps.proxy.policy import FAIR_SHARE, SLACK_TOKENS, Policy
from layerpush.apps.proxy.settings import Settings
from layerpush.core.config import LayerPushConfig
from layerpush.core.request_params import check_params

ROOT = Path(__file__).parents[3]
PROXY, PARAMS = (ROOT / "docs" / name for name in ("proxy.md", "kv-transfer-params.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_page_names_every_metric_and_its_labels() -> None:
    proxy = Proxy(Settings(prefill=["http://p"], decode=["http://d"]))
    text = proxy.metrics.text().decode()
    described = {name for name in re.findall(r"^# HELP (\w+) ", text, re.MULTILINE) if not name.endswith("_created")}
    named = set(re.findall(r"^\| `(layerpush_proxy_\w+)`", PROXY.read_text(), re.MULTILINE))
    assert named == described
    for row in re.findall(r"^\| `(layerpush_proxy_\w+)` \| (.*?) \|", PROXY.read_text(), re.MULTILINE):
        assert set(re.findall(r"`(\w+)`", row[1])) == labels(proxy, row[0])


def labels(proxy: Proxy, name: str) -> set[str]:
    metrics = proxy.metrics
    counters = {
        "requests_total": metrics.requests,
        "dispatches_total": metrics.dispatches,
        "retries_total": metrics.retries,
        "leg_failures_total": metrics.leg_failures,
        "time_to_first_token_seconds": metrics.first_token,
        "after_prefill_seconds": metrics.after_prefill,
        "request_duration_seconds": metrics.duration,
    }
    short = name.removeprefix("layerpush_proxy_")
    if short in counters:
        return set(counters[short]._labelnames)
    return {"role", "engine"} if short.startswith("engine_") else set()


def test_the_page_names_every_policy_and_its_bounds() -> None:
    text = PROXY.read_text()
    assert set(re.findall(r"^\| `(\w+)` \| [a-z]", text.split("## Policies")[1].split("## Options")[0], re.M)) == set(
        get_args(Policy)
    )
    assert f"more tokens to compute than {FAIR_SHARE:g} times the mean plus {SLACK_TOKENS:,}" in text


@pytest.mark.parametrize("command", [each for each in blocks(PROXY) if "layerpush proxy" in each])
def test_the_commands_start_a_proxy(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layerpush.apps.proxy.server, "serve", lambda *arguments: started.append(arguments) or True)
    script = f'layerpush() {{ printf "%s\\0" "$@"; }}\n{command}'
    words = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert CliRunner().invoke(app, words).exit_code == 0
    ((settings,),) = started
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    if "--engines-file" in words:
        assert read_engines_file(settings.engines_file)["decode"] == ["http://10.0.0.2:8000"]
    else:
        assert settings.prefill[0] in ("http://10.0.0.1:8000", "dns://layerpush-prefill:8000")
    if "--prefill-identity" in words:
        assert settings.identities == {"http://10.0.0.1:8000": Identity("prefill-0", "10.0.0.1", 5600, 1)}


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers as P would, and keeps the requests."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.headers["X-Request-Id"], body))  # type: ignore[attr-defined]
        params = Identity("prefill-0", "10.0.0.1", 5600, 1).to_decode(f"cmpl-{self.headers['X-Request-Id']}-0-suffix")
        answer = json.dumps({"kv_transfer_params": params}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def engine() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        server.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("flow", [0, 1], ids=["concurrent", "sequential"])
def test_the_curl_examples_send_valid_params(flow: int) -> None:
    script = blocks(PARAMS)[flow]
    with engine() as p, engine() as d:
        for address, server in (("10.0.0.1:8000", p), ("10.0.0.2:8000", d)):
            script = script.replace(f"http://{address}", f"http://127.0.0.1:{server.server_port}")
        subprocess.run(["bash", "-euc", script], check=True, timeout=60, capture_output=True)
    ((p_id, to_p),) = p.seen
    ((d_id, to_d),) = d.seen
    assert p_id == d_id
    assert to_p["prompt"] == to_d["prompt"]
    assert to_p["max_tokens"] == 1
    check_params(to_p["kv_transfer_params"], "kv_producer", LayerPushConfig())
    check_params(to_d["kv_transfer_params"], "kv_consumer", LayerPushConfig())
    assert to_p["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    suffix = ("", "-suffix")[flow]
    expected = Identity("prefill-0", "10.0.0.1", 5600, 1).to_decode(f"cmpl-{p_id}-0{suffix}")
    assert {"dcp_size": 1} | to_d["kv_transfer_params"] == expected
