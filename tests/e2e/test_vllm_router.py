"""vLLM's router, as the package index has it, before two prefill and two decode engines of ours."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from layerpush.apps.demo.engines import Engine, EngineGroup
from layerpush.apps.demo.interrupts import Interrupts
from layerpush.apps.demo.ports import PortAllocator
from layerpush.apps.tracing.figures import read_pushes
from layerpush.telemetry.trace_records import PushRecord
from tests.e2e.docsrig import block
from tests.e2e.proxyrig import (
    MODEL,
    START_TIMEOUT_S,
    WORDS,
    ReservedPorts,
    client_of,
    get,
    model_with_tokenizer,
    server_spec,
    until,
    words,
)

ROOT = Path(__file__).parents[2]
ROUTER = ROOT / "build" / "vllm-router" / "bin" / "vllm-router"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
TOKENS = 1500
patient = pytest.mark.timeout(600)


@dataclass
class Stack:
    """``start_prefill`` starts another process in the place of one that has ended, by its number."""

    url: str
    trace_dir: Path
    plain: Engine
    prefills: list[Engine]
    start_prefill: Callable[[int, str], Engine]

    def pushes(self, known: Collection[str] = ()) -> list[PushRecord]:
        """All but those of these requests."""
        return [push for push in read_pushes(self.trace_dir) if push.request_id not in known]

    def known(self) -> set[str]:
        """The requests that P has pushed so far."""
        return {push.request_id for push in self.pushes()}

    def text(self, prompt: str, *, chat: bool = False, stream: bool = False) -> str:
        """The router's answer."""
        return answer(client_of(self.url), prompt, chat=chat, stream=stream)

    def right(self, prompt: str, *, chat: bool = False) -> str:
        """The plain engine's answer."""
        return answer(client_of(self.plain.url), prompt, chat=chat, stream=False)


def answer(client: openai.OpenAI, prompt: str, *, chat: bool, stream: bool) -> str:
    if chat:
        messages: Any = [{"role": "user", "content": prompt}]
        said: Any = client.chat.completions.create(messages=messages, stream=stream, **GREEDY)
        if stream:
            return "".join(event.choices[0].delta.content or "" for event in said if event.choices)
        return str(said.choices[0].message.content)
    said = client.completions.create(prompt=prompt, stream=stream, **GREEDY)
    return "".join(event.choices[0].text for event in said) if stream else str(said.choices[0].text)


@contextlib.contextmanager
def router(scratch: Path, port: int, metrics_port: int, prefills: list[Engine], decodes: list[Engine]) -> Iterator[str]:
    """The router as the page starts it, but for ports and engines; ready. Its URL."""
    documented = shlex.split(block("docs/routers.md", "vllm-router").text.replace("\\\n", ""))
    command = [str(ROUTER), *documented[1 : documented.index("--prefill")]]
    command += ["--port", str(port), "--prometheus-port", str(metrics_port)]
    for engine in prefills:
        command += ["--prefill", engine.url]
    for engine in decodes:
        command += ["--decode", engine.url]
    with (scratch / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: get(f"{url}/health")[0] == 200, "the router is ready")
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    subprocess.run([ROOT / "scripts" / "vllm-router"], check=True)
    scratch = tmp_path_factory.mktemp("router")
    model = model_with_tokenizer(scratch / "model")
    ports = PortAllocator(range(19400, 19500))
    places = [(ports.take(), ports.take()) for _ in range(2)]
    tracing: dict[str, object] = {"trace_dir": str(scratch / "trace")}
    with Interrupts() as interrupts, contextlib.ExitStack() as groups:

        def start_prefill(number: int, engine_id: str) -> Engine:
            group = groups.enter_context(EngineGroup(scratch, interrupts, ReservedPorts(places[number])))
            return group.start(server_spec(engine_id, "prefill", model, WORDS, extra=tracing))

        others = groups.enter_context(EngineGroup(scratch, interrupts, ports))
        plain = others.start(server_spec("plain", "plain", model, WORDS))
        decodes = [others.start(server_spec(f"decode-{number}", "decode", model, WORDS)) for number in range(2)]
        prefills = [start_prefill(number, f"prefill-{number}") for number in range(2)]
        others.wait_ready([plain, *decodes])
        for engine in prefills:
            until(engine.is_ready, f"{engine.name} is ready", START_TIMEOUT_S)
        with router(scratch, ports.take(), ports.take(), prefills, decodes) as url:
            running = Stack(url, scratch / "trace", plain, prefills, start_prefill)
            for seed in range(8):  # the router learns who each P is; each P and each D connect when they first meet
                running.text(words(40, seed=seed))
            yield running


@patient
@pytest.mark.parametrize("stream", [False, True], ids=["answer", "stream"])
@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_layers_stream(stack: Stack, chat: bool, stream: bool) -> None:
    """The router asks P and D at the same time once it knows P."""
    known = stack.known()
    for seed in range(2):  # one for each P
        prompt = words(TOKENS, seed=100 + seed + 2 * stream + 4 * chat)
        assert stack.text(prompt, chat=chat, stream=stream) == stack.right(prompt, chat=chat)
    until(lambda: len(stack.pushes(known)) == 2, "traces of both pushes")
    pushes = stack.pushes(known)
    assert {(push.mode, push.fallback, push.outcome) for push in pushes} == {("auto", None, "completed")}
    assert {push.engine_id for push in pushes} == {engine.name for engine in stack.prefills}


@patient
def test_a_prefill_engine_dies_and_comes_back(stack: Stack) -> None:
    """Under its old engine id, as a StatefulSet gives it."""
    dead = stack.prefills[0]
    dead.signal(signal.SIGKILL)
    until(lambda: not dead.members(), "P is gone")
    stack.prefills[0] = stack.start_prefill(0, dead.name)
    until(stack.prefills[0].is_ready, "P is back", START_TIMEOUT_S)
    known = stack.known()

    def is_served() -> bool:
        prompt = words(300, seed=200 + len(stack.pushes(known)))
        with contextlib.suppress(openai.APIError):
            assert stack.text(prompt) == stack.right(prompt)
        return {push.engine_id for push in stack.pushes(known) if push.outcome == "completed"} >= {dead.name}

    until(is_served, "the P that came back pushes again")
