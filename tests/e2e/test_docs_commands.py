"""Runs the documentation's commands as they are, with CPU engines."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from bench.demo.__main__ import app
from bench.servers.forkserver import ForkServer
from bench.servers.ports import PortAllocator
from layerpush.core.prefill_identity import PrefillIdentity
from tests.docblocks import Block
from tests.e2e.docsrig import Machine, Server, answer, block, loads
from tests.e2e.forkedservers import SessionForkServer
from tests.e2e.proxyrig import client_of, get, model_with_tokenizer
from tests.support.ports import DOCS_COMMANDS_PORTS

patient = pytest.mark.timeout(1200)
QUICKSTART, DEPLOYMENT, PROXY, CONTRACT = (
    f"docs/{name}.md" for name in ("quickstart", "deployment", "proxy", "kv-transfer-params")
)
ON_P, ON_D = (f"export VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.{number}" for number in (1, 2))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with contextlib.ExitStack() as stack:
        yield Machine(tmp_path, model_with_tokenizer(tmp_path / "model"), PortAllocator(DOCS_COMMANDS_PORTS), stack)


def started_proxy(machine: Machine, command: Block, name: str) -> Server:
    """A proxy that runs. Before its first request it asks P for its identity, and D loads the push of that question."""
    proxy = machine.start(command, name)
    proxy.await_healthy(machine.url("127.0.0.1:8000"))
    return proxy


@patient
def test_the_readme_and_the_contract(machine: Machine) -> None:
    """P, D, the proxy, and both ways without a proxy."""
    p, d = machine.start(block("README.md", ON_P), "P"), machine.start(block("README.md", ON_D), "D")
    p.await_healthy(machine.url("10.0.0.1:8000"))
    d.await_healthy(machine.url("10.0.0.2:8000"))
    at_d = machine.url("10.0.0.2:8000")
    for number in (0, 1):
        with loads(at_d, 1):
            assert answer(machine.run(block(CONTRACT, "id=", number)))
    proxies = [
        block("README.md", "layerpush proxy --prefill http://10.0.0.1:8000"),
        block(PROXY, "layerpush proxy --port 8000"),  # the command's second P does not run
    ]
    for number, command in enumerate(proxies):
        proxy = started_proxy(machine, command, f"proxy-{number}")
        with loads(at_d, 1 + 1):
            assert answer(machine.run(block(PROXY, "curl")))
        proxy.stop()
    assert "layerpush: 6 layers, granularity auto" in p.log.read_text()


@patient
@pytest.mark.parametrize("load", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_quickstart_by_hand(machine: Machine, load: bool) -> None:
    """Its prompts are pushed by layer. The load imports vLLM itself."""
    p = machine.start(block(QUICKSTART, "docs/examples/prefill.sh"), "P")
    d = machine.start(block(QUICKSTART, "docs/examples/decode.sh"), "D")
    p.await_healthy(machine.url("127.0.0.1:8100"))
    d.await_healthy(machine.url("127.0.0.1:8200"))
    started_proxy(machine, block(QUICKSTART, "layerpush proxy --prefill http://127.0.0.1:8100"), "proxy")
    with loads(machine.url("127.0.0.1:8200"), 1 + 2 + 1):
        said = machine.run(block(QUICKSTART, "docs/examples/request.sh"))
        (pushed,) = re.findall(r'vllm:layerpush_pushes_total\{.*outcome="layerwise".*\} (\d)', said)
        assert int(pushed) >= 1
        assert machine.run(block(QUICKSTART, "python docs/examples/client.py")).strip()
    if load:
        assert "Successful requests:" in machine.run(block(QUICKSTART, "python docs/examples/load.py"))


@patient
@pytest.mark.exhaustive
def test_the_deployment(machine: Machine) -> None:
    """One P and one D. The command names one more of each, which do not run. D refuses hosts outside allowed_hosts."""
    p, d = machine.start(block(DEPLOYMENT, ON_P), "P"), machine.start(block(DEPLOYMENT, ON_D), "D")
    p.await_healthy(machine.url("10.0.0.1:8000"))
    d.await_healthy(machine.url("10.0.0.2:8000"))
    at_d = machine.url("10.0.0.2:8000")
    started_proxy(machine, block(DEPLOYMENT, "layerpush proxy --host 0.0.0.0"), "proxy")
    with loads(at_d, 1 + 1):
        assert answer(machine.run(block(PROXY, "curl")))
    elsewhere = {"kv_transfer_params": PrefillIdentity("prefill-0", "127.0.0.1", 5600, 1).to_decode("a-request")}
    with pytest.raises(
        openai.BadRequestError, match=r"'remote_host' is '127.0.0.1' .str., which is not in this engine's"
    ):
        client_of(at_d).completions.create(model=str(machine.model), prompt="w5", extra_body=elsewhere)


@patient
@pytest.mark.exhaustive
def test_the_configuration(machine: Machine) -> None:
    start = block("docs/configuration.md", "vllm serve MODEL")
    host = "export VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5600"
    p = machine.start(start, "P", f'{host}\nvllm() {{ command vllm "$@" --port 8000; }}')
    p.await_healthy(machine.url("10.0.0.1:8000"))
    assert get(machine.url("10.0.0.1:8000") + "/v1/models")[0] == 200


@patient
@pytest.mark.parametrize("fork_server", [SessionForkServer, pytest.param(ForkServer, marks=pytest.mark.exhaustive)])
def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: type[ForkServer]) -> None:
    """``make demo``, with one short prompt and answer instead of four long ones. A `ForkServer` imports vLLM itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench.servers.engines.ForkServer", fork_server)
    monkeypatch.setattr("bench.demo.__main__.ANSWER_TOKENS", 4)
    done = CliRunner().invoke(app, ["--prompts", "1", "--prompt-tokens", "300", "--json", "demo.json"])
    assert done.exit_code == 0, done.output
    modes = json.loads((tmp_path / "demo.json").read_text())["modes"]
    assert sorted(modes) == ["auto", "chunk", "layer", "request"]
    assert all(mode["tokens_equal"] for mode in modes.values())
    assert (tmp_path / "layerpush-demo.png").stat().st_size > 10_000
