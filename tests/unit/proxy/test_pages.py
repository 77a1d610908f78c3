"""The proxy's pages name existing things, and their examples work as described."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import layerpush.apps.proxy.server
from layerpush.apps.cli import app
from layerpush.core.config import LayerPushConfig
from layerpush.core.prefill_identity import PrefillIdentity
from layerpush.core.request_params import check_params
from tests.support.http_servers import QuietHandler, serving

ROOT = Path(__file__).parents[3]
PROXY, PARAMS = (ROOT / "docs" / name for name in ("proxy.md", "kv-transfer-params.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("command", [each for each in blocks(PROXY) if "layerpush proxy" in each])
def test_the_commands_start_a_proxy(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(layerpush.apps.proxy.server, "serve", lambda *arguments: started.append(arguments) or True)
    script = f'layerpush() {{ printf "%s\\0" "$@"; }}\n{command}'
    words = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert CliRunner().invoke(app, words).exit_code == 0
    ((settings,),) = started
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.prefill[0] == "http://10.0.0.1:8000"


class PrefillHandler(QuietHandler):
    """Answers as P would, and keeps the requests."""

    def do_POST(self) -> None:
        self.server.seen.append((self.headers["X-Request-Id"], json.loads(self.read_body())))
        params = PrefillIdentity("prefill-0", "10.0.0.1", 5600, 1).to_decode(
            f"cmpl-{self.headers['X-Request-Id']}-0-suffix"
        )
        self.answer(json.dumps({"kv_transfer_params": params}).encode())


@contextlib.contextmanager
def engine() -> Iterator[Any]:
    with serving(PrefillHandler) as server:
        server.seen = []
        yield server


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
    expected = PrefillIdentity("prefill-0", "10.0.0.1", 5600, 1).to_decode(f"cmpl-{p_id}-0{suffix}")
    assert {"dcp_size": 1} | to_d["kv_transfer_params"] == expected
