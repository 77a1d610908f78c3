"""The documentation's commands on this machine, with its own hosts, ports and model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench import ROOT, calm
from bench.servers.ports import PortAllocator
from tests.docblocks import Block, command_blocks
from tests.e2e.forkedservers import server_command
from tests.e2e.proxyrig import get, until
from tests.metrics_scrape import Scrape

START_S, ANSWER_S, STOP_S = 400.0, 120.0, 40.0
EXAMPLES = "docs/examples"
PAGES_PORTS = (8000, 8100, 8200, 5600, 5700)
# Pages expect a GPU for each engine. With these options an engine runs on a small part of this machine. The page's chat
# names no length of its answer: it fills the context.
ON_A_CPU = (
    "--dtype float32 --max-model-len 128 --block-size 32 --max-num-seqs 8 "
    "--kv-cache-memory-bytes 268435456 --enforce-eager"
)
STAND_INS: Mapping[str, str] = {
    "vllm": (
        'shift; model=$1; shift; exec {server} --model "$model" '
        f'--host "${{{{VLLM_NIXL_SIDE_CHANNEL_HOST-127.0.0.1}}}}" {ON_A_CPU} "$@"'
    ),
    "layerpush": 'exec "{python}" -m layerpush "$@"',
    "python": (
        'if [ "${{1-}} ${{2-}}" = "-m vllm.entrypoints.openai.api_server" ]; then shift 2; exec {server} "$@"; '
        'fi; exec "{python}" "$@"'
    ),
    "python3": 'exec "{python}" "$@"',
}


@dataclass
class Machine:
    """Runs blocks of commands in ``scratch``. It replaces a page's 10.0.0.x by 127.0.1.x, and ports by free ones."""

    scratch: Path
    model: Path
    ports: PortAllocator
    stack: contextlib.ExitStack
    numbers: dict[int, int] = field(default_factory=dict)
    proxy_port: int = 0

    def __post_init__(self) -> None:
        programs = self.scratch / "bin"
        programs.mkdir()
        server = shlex.join(server_command())
        for name, body in STAND_INS.items():
            text = body.format(python=sys.executable, server=server)
            (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (programs / name).chmod(0o755)
        self.new_ports()
        for example in (ROOT / EXAMPLES).glob("*.*"):
            copy = self.scratch / EXAMPLES / example.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(self.here(example.read_text()))
            copy.chmod(0o755)

    def new_ports(self) -> None:
        """Take new ports, different from those of earlier servers."""
        self.numbers = {port: self.ports.next_free() for port in PAGES_PORTS}
        self.proxy_port = self.ports.next_free()

    def here(self, text: str) -> str:
        """A page's text with this machine's addresses, ports and model."""
        text = re.sub(r"(layerpush proxy(?:[^\n]|\\\n)*?--port) 8000\b", rf"\1 {self.proxy_port}", text)
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.proxy_port}")
        text = re.sub(r"\b(8[012]00|5[67]00)\b", lambda match: str(self.numbers[int(match[1])]), text)
        text = text.replace("10.0.0.", "127.0.1.").replace("/var/tmp/layerpush", str(self.scratch / "traces"))
        return re.sub(r"\bMODEL\b|Qwen/Qwen3-0.6B|build/model", str(self.model), text)

    def url(self, address: str) -> str:
        """The URL here of a page's address, such as ``10.0.0.1:8000``."""
        return self.here(f"http://{address}")

    def start(self, block: Block, name: str, before: str = "") -> Server:
        """Start a block in the background, until ``stack`` closes. ``before`` are commands of the same shell."""
        log = self.scratch / f"{name}-{self.proxy_port}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-euc", f"{self.here(before)}\n{self.here(block.text)}"],
                env=self.environment(self.scratch / "bin"),
                cwd=self.scratch,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(name, process, log)
        self.stack.callback(server.stop)
        return server

    def run(self, block: Block) -> str:
        """The output of a block, which must end with status 0."""
        done = subprocess.run(
            ["bash", "-euc", self.here(block.text)],
            env=self.environment(self.scratch / "bin"),
            cwd=self.scratch,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @staticmethod
    def environment(programs: Path) -> dict[str, str]:
        """The environment of an engine on this machine. ``programs`` come first in ``PATH``."""
        dropped = ("VLLM_", "UCX_", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        return inherited | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{calm.FOLDER}",
            "HF_HUB_OFFLINE": "1",
            "LAYERPUSH_CALM": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "UCX_NET_DEVICES": "lo",
            "UCX_TLS": "tcp,self",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
        }


@dataclass
class Server:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def await_healthy(self, url: str) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"{self.name} has ended:\n{self.tail()}"
            return get(f"{url}/health")[0] == 200

        try:
            until(ready, f"{self.name} is healthy", START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def stop(self) -> None:
        """End the server's own process group."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


def block(page: str, first: str, number: int = 0) -> Block:
    """The page's block that begins with ``first``. ``number`` counts such blocks, from 0."""
    found = [one for one in command_blocks((page,)) if one.first.startswith(first)]
    assert len(found) > number, f"{page} has no block {number} that begins with {first!r}"
    return found[number]


@contextlib.contextmanager
def loads(url: str, count: int) -> Iterator[None]:
    """Check that this D loads ``count`` pushes meanwhile."""

    def loaded() -> float:
        return Scrape(get(f"{url}/metrics")[1]).value("loads_total", outcome="loaded")

    before = loaded()
    yield
    until(lambda: loaded() == before + count, f"{count} loads")


def answer(text: str) -> str:
    """The text of a completion's or a chat's answer, streamed or not. Raises ``AssertionError`` for an error."""
    if text.startswith("data: "):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", text
        return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    body = json.loads(text)
    assert "choices" in body, text
    choice = body["choices"][0]
    content: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return content
