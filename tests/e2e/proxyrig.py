"""Real API servers with a tokenizer, and `layerpush proxy` in front of a P and a D, each a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.figures import read_pushes
from bench.servers.engines import SERVED_NAME, EngineGroup, EngineServer, EngineSpec, Role, no_proxy
from bench.servers.interrupts import Interrupts
from bench.servers.model import ModelShape, write_model
from bench.servers.ports import PortAllocator
from layerpush.telemetry.trace_records import PushRecord
from tests.e2e.enginespec import LAYERWISE
from tests.e2e.forkedservers import ForkedSpec
from tests.support import waiting
from tests.support.ports import PROXY_PORTS

SHAPE = ModelShape(layers=6)
MODEL = SERVED_NAME
PROXY = "layerpush"
DEADLINE_S = 60.0
START_TIMEOUT_S = 300.0
WORDS = "--no-skip-tokenizer-init"
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
"""A tokenizer looks for these first, so none of them is part of a word."""
HALVES = (7, 8)
"""Tokens that are words in a prompt. In an answer, each is a byte of ``é``: the first, and the second."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def words(count: int, seed: int) -> str:
    """A prompt of ``count`` tokens. Prompts of different seeds share no block."""
    names = SHAPE.vocabulary - len(SPECIAL_TOKENS)
    return " ".join(f"w{len(SPECIAL_TOKENS) + (seed * 7919 + index * 31) % names}" for index in range(count))


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    waiting.until(condition, what, deadline_s, pause_s=0.05)


def get(url: str) -> tuple[int, str]:
    """Status and body. Status 0: nothing listens."""
    try:
        with no_proxy.open(url, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def metric(url: str, line_start: str) -> float:
    """The sum of a server's samples whose lines begin with ``line_start``."""
    lines = get(f"{url}/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))


def has_a_request(url: str) -> bool:
    """Whether an engine has an unfinished request."""
    return metric(url, "vllm:num_requests_running") + metric(url, "vllm:num_requests_waiting") > 0


def ask_and_leave(url: str, body: Mapping[str, object], when: Callable[[], object], **headers: str) -> None:
    """Send a completion request, and leave without an answer as soon as ``when`` holds."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"} | headers)
        until(when, "the client may leave")


@dataclass
class Rig:
    """A P, two D, and a proxy in front of P and D. The second D starts its answers with P's token. P's answers without
    a transfer are the right ones.
    """

    scratch: Path
    ports: PortAllocator
    url: str
    prefill: EngineServer
    decodes: list[EngineServer]
    start_prefill: Callable[[str], EngineServer]

    @property
    def trace_dir(self) -> Path:
        return self.scratch / "trace"

    @property
    def client(self) -> openai.OpenAI:
        return client_of(self.url)

    @property
    def expected(self) -> openai.OpenAI:
        """The client of P, which gives the right answers."""
        return client_of(self.prefill.url)

    def proxy(self, *options: str, module: str = PROXY) -> contextlib.AbstractContextManager[ProxyProcess]:
        """Another proxy in front of the same engines."""
        return proxy(self.scratch, self.ports.next_free(), self.prefill, self.decodes, options, module)

    def working_decode(self) -> EngineServer | None:
        """The D with a request."""
        return next((engine for engine in self.decodes if has_a_request(engine.url)), None)

    def restart_prefill(self, engine_id: str) -> None:
        """Start another process at P's address, under another engine id. Does not wait until it is ready."""
        self.prefill = self.start_prefill(engine_id)

    def introduce(self) -> None:
        """Connect P to each D by a first prompt: the connection takes longer than a prompt."""
        prompts = [words(100, seed=index) for index in range(len(self.decodes))]
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self.client.completions.create(model=MODEL, prompt=prompt), prompts))
        for decode in self.decodes:
            assert metric(decode.url, "vllm:request_success_total"), f"{decode.name} has had no request"

    def await_idle(self) -> None:
        """Wait until no engine and no proxy has a request."""
        until(lambda: health(self.url)["requests"] == 0, "the proxy is idle")
        for engine in (self.prefill, *self.decodes):
            until(lambda: metric(engine.url, "vllm:num_requests_running") == 0, f"{engine.name} is idle")  # noqa: B023
            until(lambda: metric(engine.url, "vllm:num_requests_waiting") == 0, f"{engine.name} is idle")  # noqa: B023


@dataclass
class ProxyProcess:
    """`layerpush proxy`, ready."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return client_of(self.url)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


class ReservedPorts(PortAllocator):
    """Hands out ports that another allocator has reserved: a restarted P listens on the first P's ports. Waits until
    the first P's last process is gone: it ends later than its client.
    """

    def next_free(self) -> int:
        port = next(self._candidates)
        until(lambda: nobody_listens(port), f"port {port} is free")
        return port


def nobody_listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def rig(scratch: Path) -> Iterator[Rig]:
    """All servers, ready until the block ends."""
    model = model_with_tokenizer(scratch / "model")
    ports = PortAllocator(PROXY_PORTS)
    at_p = (ports.next_free(), ports.next_free())
    turns = {"bidirectional_kv_xfer": True}
    at_prefill = {"trace_dir": str(scratch / "trace"), **turns}
    with Interrupts() as interrupts, contextlib.ExitStack() as groups:

        def start_prefill(engine_id: str) -> EngineServer:
            group = groups.enter_context(EngineGroup(scratch, interrupts, ReservedPorts(at_p)))
            return group.start(server_spec(engine_id, "prefill", model, WORDS, extra=at_prefill))

        others = groups.enter_context(EngineGroup(scratch, interrupts, ports))
        decodes = [
            others.start(server_spec(f"decode-{index}", "decode", model, WORDS, extra={"first_token": origin, **turns}))
            for index, origin in enumerate(("decode", "prefill"))
        ]
        prefill = start_prefill("prefill-first")
        others.wait_ready(decodes)
        until(prefill.is_ready, "P is ready", START_TIMEOUT_S)
        with proxy(scratch, ports.next_free(), prefill, decodes) as served:
            running = Rig(scratch, ports, served.url, prefill, decodes, start_prefill)
            running.introduce()
            yield running


@contextlib.contextmanager
def proxy(
    scratch: Path,
    port: int,
    prefill: EngineServer,
    decodes: list[EngineServer],
    options: Sequence[str] = (),
    module: str = PROXY,
) -> Iterator[ProxyProcess]:
    """Runs `layerpush proxy`; it is ready when the block begins."""
    arguments = ["--port", str(port), "--prefill", prefill.url]
    for decode in decodes:
        arguments += ["--decode", decode.url]
    log_path = scratch / f"proxy-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "proxy", *arguments, *options], stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: get(f"{url}/health")[0] == 200, "the proxy is ready")
        yield ProxyProcess(url, process, log_path)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def server_spec(
    name: str,
    role: Role,
    model: Path,
    *options: str,
    extra: dict[str, object] | None = None,
    kind: type[EngineSpec] = ForkedSpec,
) -> EngineSpec:
    return kind(
        name=name,
        role=role,
        model=model,
        connector=LAYERWISE,
        extra_config=extra or {},
        tokens_per_step=256,
        max_model_len=4096,
        kv_cache_bytes=8192 * SHAPE.kv_bytes_per_token,
        options=options,
    )


def model_with_tokenizer(directory: Path) -> Path:
    """The demo's model with a tokenizer: token 5 is the word ``w5``, except for ``HALVES`` in answers."""
    model = write_model(directory, SHAPE)
    names = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(len(SPECIAL_TOKENS), SHAPE.vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    both = zip(HALVES, "é".encode(), strict=True)
    halves = [decoders.Replace(Regex(f"^w{token}$"), f"<0x{byte:02X}>") for token, byte in both]
    tokenizer.decoder = decoders.Sequence(
        [*halves, decoders.Replace(Regex("^w"), " w"), decoders.ByteFallback(), decoders.Fuse()]
    )
    unknown, begin, end = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(model)
    return model


def health(url: str) -> dict[str, Any]:
    """The state that a proxy reports."""
    return dict(json.loads(get(f"{url}/health")[1]))


def push_of(trace_dir: Path, request_id: str) -> PushRecord:
    """P's record of the push of a request's first prompt."""

    def found() -> list[PushRecord]:
        return [push for push in read_pushes(trace_dir) if request_id in push.request_id]

    return waiting.until(found, f"a trace of {request_id}", DEADLINE_S, pause_s=0.05)[0]


def id_of(answer_id: str) -> str:
    """The X-Request-Id in an answer's id."""
    found = re.fullmatch(r"(?:chat)?cmpl-([0-9a-f-]{36})", answer_id)
    assert found is not None, answer_id
    return found[1]
