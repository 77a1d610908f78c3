"""Real API servers with a tokenizer, and `layerpush proxy` in front of a P and a D, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from layerpush.demo.engines import Engine, EngineGroup, EngineSpec, Role
from layerpush.demo.interrupts import Interrupts
from layerpush.demo.model import ModelShape, write_model
from layerpush.demo.ports import PortAllocator

SHAPE = ModelShape(layers=6)
MODEL = "demo"
CONNECTOR = "LayerwisePushConnector"
DEADLINE_S = 60.0
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def words(count: int, seed: int) -> str:
    """A prompt of as many tokens; others share no block with it."""
    return " ".join(f"w{3 + (seed * 7919 + index * 31) % (SHAPE.vocabulary - 3)}" for index in range(count))


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def get(url: str) -> tuple[int, str]:
    """Status and body; 0 if nobody listens."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def metric(url: str, line_start: str) -> float:
    """The sum of all samples of a server that begin with this."""
    lines = get(f"{url}/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))


@dataclass
class Rig:
    """``restart_prefill`` starts another process at P's address, under another engine id."""

    url: str
    plain: Engine
    prefill: Engine
    decode: Engine
    trace_dir: Path
    groups: contextlib.ExitStack
    start_prefill: Callable[[str], tuple[EngineGroup, Engine]]
    prefill_group: EngineGroup

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)

    @property
    def expected(self) -> openai.OpenAI:
        """A plain engine, which says what is right."""
        return openai.OpenAI(base_url=f"{self.plain.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)

    def kill_prefill(self) -> None:
        self.prefill_group.stop([self.prefill])

    def restart_prefill(self, engine_id: str) -> None:
        self.prefill_group, self.prefill = self.start_prefill(engine_id)
        self.prefill_group.wait_ready([self.prefill])

    def await_idle(self) -> None:
        """Neither engine works for anybody."""
        for engine in (self.prefill, self.decode):
            until(lambda: metric(engine.url, "vllm:num_requests_running") == 0, f"{engine.name} is idle")  # noqa: B023
            until(lambda: metric(engine.url, "vllm:num_requests_waiting") == 0, f"{engine.name} is idle")  # noqa: B023


@contextlib.contextmanager
def rig(scratch: Path) -> Iterator[Rig]:
    """All servers, ready; leaving takes them down."""
    model = _model_with_tokenizer(scratch / "model")
    trace_dir = scratch / "trace"
    ports = PortAllocator(range(19100, 19200))
    at_p = (ports.take(), ports.take())
    with Interrupts() as interrupts, contextlib.ExitStack() as groups:

        def start_prefill(engine_id: str) -> tuple[EngineGroup, Engine]:
            group = groups.enter_context(EngineGroup(scratch, interrupts, PortAllocator(at_p)))
            return group, group.start(_spec(engine_id, "prefill", model, {"trace_dir": str(trace_dir)}))

        others = groups.enter_context(EngineGroup(scratch, interrupts, ports))
        plain = others.start(_spec("plain", "plain", model))
        decode = others.start(_spec("decode", "decode", model))
        prefill_group, prefill = start_prefill("prefill-first")
        others.wait_ready([plain, decode])
        prefill_group.wait_ready([prefill])
        with proxy(scratch, ports.take(), prefill.url, decode.url) as url:
            yield Rig(url, plain, prefill, decode, trace_dir, groups, start_prefill, prefill_group)


@contextlib.contextmanager
def proxy(scratch: Path, port: int, prefill: str, decode: str) -> Iterator[str]:
    """Its URL, when it is ready."""
    options = ["--port", str(port), "--prefill", prefill, "--decode", decode, "--health-check-interval-secs", "0.5"]
    with (scratch / "proxy.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "layerpush", "proxy", *options], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: get(f"{url}/health")[0] == 200, "the proxy is ready")
        yield url
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def _spec(name: str, role: Role, model: Path, extra: dict[str, object] | None = None) -> EngineSpec:
    return EngineSpec(
        name=name,
        role=role,
        model=model,
        connector=None if role == "plain" else CONNECTOR,
        extra_config=extra or {},
        tokens_per_step=256,
        max_model_len=2048,
        kv_cache_bytes=8192 * SHAPE.kv_bytes_per_token,
        options=("--no-skip-tokenizer-init",),
    )


def _model_with_tokenizer(directory: Path) -> Path:
    """The demo's model, and a tokenizer for which token 5 is the word ``w5``."""
    model = write_model(directory, SHAPE)
    vocabulary = {f"w{index}": index for index in range(SHAPE.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(model)
    return model


def dispatches(rig: Rig, mode: str) -> float:
    return metric(rig.url, f'layerpush_proxy_dispatches_total{{mode="{mode}"}}')


def dispatch_of_prefill(rig: Rig) -> str:
    """What the proxy says of its P."""
    body = get(f"{rig.url}/health")[1]
    return next((each["dispatch"] for each in json.loads(body)["engines"] if each["role"] == "prefill"), "")


def id_of(answer_id: str) -> str:
    """The X-Request-Id that an answer's id was made of."""
    found = re.fullmatch(r"(?:chat)?cmpl-([0-9a-f-]{36})", answer_id)
    assert found is not None, answer_id
    return found[1]
