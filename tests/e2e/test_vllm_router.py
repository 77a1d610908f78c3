"""vLLM's router from the package index, in front of two prefill engines and a decode engine with two names. They also
answer requests from our backend for Ray Serve. In the end a P drains: ``vllm serve --shutdown-timeout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp
import openai
import pytest

from bench.servers.engines import LOOPBACK, EngineGroup, EngineServer, no_proxy
from bench.servers.interrupts import Interrupts
from bench.servers.load import GreedyAnswer as Completed
from bench.servers.load import RequestFailedError, complete, complete_disaggregated, make_prompt
from bench.servers.ports import PortAllocator
from layerpush.telemetry.trace_records import PushRecord
from tests.e2e.docsrig import block
from tests.e2e.proxyrig import (
    DEADLINE_S,
    MODEL,
    SHAPE,
    SPECIAL_TOKENS,
    START_TIMEOUT_S,
    WORDS,
    ReservedPorts,
    client_of,
    get,
    metric,
    model_with_tokenizer,
    push_of,
    server_spec,
    until,
    words,
)
from tests.e2e.servedrig import scrape
from tests.support.http_servers import QuietHandler, serving
from tests.support.ports import ROUTER_PORTS
from tests.support.rays import HOST, PORT, Completion, ray_in_place

ROOT = Path(__file__).parents[2]
ROUTER = ROOT / "build" / "vllm-router" / "bin" / "vllm-router"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
TOKENS = 1000
END = SPECIAL_TOKENS.index("</s>")
UNKNOWN_S = 8
"""P's `unknown_request_timeout_s`: the longest wait for a request that P has refused, and for one on a busy machine."""
patient = pytest.mark.timeout(600)


@dataclass
class Stack:
    """``start_prefill`` starts another process in the place of an ended P, by its number."""

    url: str
    scratch: Path
    ports: PortAllocator
    prefills: list[EngineServer]
    decode: EngineServer
    start_prefill: Callable[[int, str], EngineServer]

    def push(self, request_id: str) -> PushRecord:
        """P's record of the push for the answer with this id."""
        return push_of(self.scratch / "trace", request_id)

    def answer(self, prompt: str, *, chat: bool = False, stream: bool = False) -> Answer:
        """The router's answer."""
        return ask(client_of(self.url), prompt, chat=chat, stream=stream)

    def right(self, prompt: str, *, chat: bool = False) -> str:
        """The answer of a P without a transfer."""
        return ask(client_of(self.prefills[1].url), prompt, chat=chat).text


class Answer(NamedTuple):
    """``id`` begins the ids of P's and of D's request."""

    text: str
    id: str


def ask(client: openai.OpenAI, prompt: str, *, chat: bool = False, stream: bool = False) -> Answer:
    if chat:
        messages: Any = [{"role": "user", "content": prompt}]
        said: Any = client.chat.completions.create(messages=messages, stream=stream, **GREEDY)
        if not stream:
            return Answer(str(said.choices[0].message.content), said.id)
        events = list(said)
        return Answer("".join(each.choices[0].delta.content or "" for each in events if each.choices), events[0].id)
    said = client.completions.create(prompt=prompt, stream=stream, **GREEDY)
    events = list(said) if stream else [said]
    return Answer("".join(each.choices[0].text for each in events), events[0].id)


@contextlib.contextmanager
def router(scratch: Path, ports: PortAllocator, page: str, engines: Mapping[str, str]) -> Iterator[str]:
    """The URL of a ready router. It runs by the command of ``page``, except for the port.

    ``engines`` has a URL here for each engine's host in the page.
    """
    urls = {f"http://{host}:8000": url for host, url in engines.items()}
    documented = shlex.split(block(page, "vllm-router").text.replace("\\\n", ""))
    assert urls.keys() == {word for word in documented if word.startswith("http://")}
    port = ports.next_free()
    command = [str(ROUTER), *(urls.get(word, word) for word in documented[1:])]
    command += ["--port", str(port), "--prometheus-port", str(ports.next_free())]
    with (scratch / f"router-{port}.log").open("wb") as log:
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


def post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
    request = urllib.request.Request(url, body, dict(headers))
    with no_proxy.open(request, timeout=DEADLINE_S) as response:
        return response.status, response.read().decode()


@contextlib.contextmanager
def refusing(engine: EngineServer, port: int) -> Iterator[str]:
    """The URL of an HTTP server in front of ``engine``. It answers with the status in a request's ``user``."""

    class RefusingHandler(QuietHandler):
        def do_GET(self) -> None:
            self.pass_on(*get(engine.url + self.path))

        def do_POST(self) -> None:
            body = self.read_body()
            status = json.loads(body).get("user")
            if status is not None:
                self.pass_on(int(status), json.dumps({"error": {"message": "P refuses", "code": int(status)}}))
                return
            headers = {name: self.headers[name] for name in ("Content-Type", "X-Request-Id")}
            self.pass_on(*post(engine.url + self.path, body, headers))

        def pass_on(self, status: int, text: str) -> None:
            self.answer(text.encode(), status)

    with serving(RefusingHandler, port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    subprocess.run([ROOT / "scripts" / "vllm-router"], check=True)
    scratch = tmp_path_factory.mktemp("router")
    model = model_with_tokenizer(scratch / "model")
    ports = PortAllocator(ROUTER_PORTS)
    places = [(ports.next_free(), ports.next_free()) for _ in range(2)]
    extra: dict[str, object] = {"trace_dir": str(scratch / "trace"), "unknown_request_timeout_s": UNKNOWN_S}
    with Interrupts() as interrupts, contextlib.ExitStack() as groups:

        def start_prefill(number: int, engine_id: str) -> EngineServer:
            group = groups.enter_context(EngineGroup(scratch, interrupts, ReservedPorts(places[number])))
            return group.start(
                server_spec(engine_id, "prefill", model, WORDS, "--shutdown-timeout", "120", extra=extra)
            )

        others = groups.enter_context(EngineGroup(scratch, interrupts, ports))
        decode = others.start(server_spec("decode", "decode", model, WORDS))
        prefills = [start_prefill(number, f"prefill-{number}") for number in range(2)]
        others.wait_ready([decode])
        for engine in prefills:
            until(engine.is_ready, f"{engine.name} is ready", START_TIMEOUT_S)
        hosts = ("10.0.0.1", "10.0.0.3", "10.0.0.2", "10.0.0.4")
        names = decode.url, decode.url.replace(LOOPBACK.host, "localhost")
        engines = dict(zip(hosts, [*(engine.url for engine in prefills), *names], strict=True))
        with router(scratch, ports, "docs/deployment.md", engines) as url:
            running = Stack(url, scratch, ports, prefills, decode, start_prefill)
            for seed in range(8):  # the router learns each P's identity, and each P connects to D
                running.answer(words(40, seed=seed))
            yield running


@patient
def test_p_pushes_by_layer(stack: Stack) -> None:
    """Once the router knows P, it asks P and D at the same time. Each P gets one of the requests."""
    pushes = []
    for chat, seed in ((False, 100), (True, 101)):
        prompt = words(TOKENS, seed=seed)
        answer = stack.answer(prompt, chat=chat, stream=chat)
        assert answer.text == stack.right(prompt, chat=chat)
        pushes.append(stack.push(answer.id))
    assert {(push.mode, push.fallback, push.outcome) for push in pushes} == {("auto", None, "completed")}
    assert {push.engine_id for push in pushes} == {engine.name for engine in stack.prefills}


@patient
def test_answers_begin_with_ps_token(stack: Stack) -> None:
    """The router adds ``min_tokens: 1`` to P's body only. A busy machine makes some tokens late."""

    def origins(origin: str) -> float:
        return scrape(stack.decode).value("first_tokens_total", origin=origin)

    before, seeds = origins("prefill"), iter(range(500, 600))

    def another() -> bool:
        prompt = words(100, seed=next(seeds))
        assert stack.answer(prompt).text == stack.right(prompt)
        return origins("prefill") > before

    until(another, "a token of P is in time")
    assert origins("other_sampling") == 0


@patient
def test_an_answer_that_ends_at_once(stack: Stack) -> None:
    """Its only token is the end of the text, which P may sample, too."""
    ending: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12, "logit_bias": {str(END): 100}}
    for number in range(4):
        prompt = words(100, seed=600 + number)
        answers = [
            client_of(url).completions.create(prompt=prompt, **ending) for url in (stack.url, stack.prefills[1].url)
        ]
        assert [(one.choices[0].text, one.choices[0].finish_reason) for one in answers] == [("", "stop")] * 2
        assert [one.usage.completion_tokens for one in answers if one.usage is not None] == [1, 1]


@patient
def test_a_prefill_engine_refuses(stack: Stack) -> None:
    """P refuses at its door, and then D's registration. Now the client gets P's error, 503 as 500. D works on."""
    p, d = stack.prefills[0], stack.decode

    def status(client: openai.OpenAI, refusal: int) -> int:
        with pytest.raises(openai.APIStatusError) as error:
            client.completions.create(prompt=words(100, seed=300 + refusal), user=str(refusal), **GREEDY)
        assert "P refuses" in error.value.response.text or f"status {refusal}" in error.value.response.text
        return error.value.status_code

    with refusing(p, stack.ports.next_free()) as at_p:
        engines = {"10.0.0.1": at_p, "10.0.0.2": d.url}
        with router(stack.scratch, stack.ports, "docs/routers.md", engines) as url:
            client = client_of(url)
            first, then = words(100, seed=300), words(100, seed=301)
            assert ask(client, first).text == stack.right(first)  # now the router knows P
            known = metric(d.url, "vllm:layerpush_loads_total")
            with ThreadPoolExecutor() as pool:
                assert list(pool.map(lambda refusal: status(client, refusal), (400, 500, 503))) == [400, 500, 500]
            until(lambda: metric(d.url, "vllm:layerpush_loads_total") == known + 3, "D has given up all three")
            assert ask(client, then).text == stack.right(then)


@patient
def test_layers_of_ray_serves_requests_stream(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks both engines at the same time, each with the request's id in the header."""
    p, d = stack.prefills[1], stack.decode
    monkeypatch.setenv(HOST, LOOPBACK.host)
    monkeypatch.setenv(PORT, str(p.side_channel_port))
    prompt, tokens = words(TOKENS, seed=400), GREEDY["max_tokens"]
    client = Completion(prompt=prompt, max_tokens=tokens, min_tokens=tokens, request_id="a client's")
    with ray_in_place() as ours:
        backend = ours.LayerwisePushBackend(
            SimpleNamespace(engine_kwargs={"kv_transfer_config": {"engine_id": p.name}})
        )
        peer = backend.replica_metadata()
        to_p = backend.prepare_prefill_request(request=client, peer=peer)
        to_d = backend.prepare_decode_request(request=client, peer=peer, prefill_response=None)

    def send(engine: EngineServer, shaped: Completion) -> str:
        body = shaped.model_dump(exclude_none=True) | {"model": MODEL, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": shaped.request_id}
        answer = json.loads(post(f"{engine.url}/v1/completions", json.dumps(body).encode(), headers)[1])
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor() as pool:
        asked = pool.submit(send, p, to_p)
        text = send(d, to_d)
        asked.result()
    assert text == stack.right(prompt)
    push = stack.push(to_p.request_id)
    assert (push.engine_id, push.mode, push.fallback, push.outcome) == (p.name, "auto", None, "completed")


@patient
def test_a_prefill_engine_dies_and_comes_back(stack: Stack) -> None:
    """P keeps its engine id, as in a StatefulSet."""
    dead = stack.prefills[0]
    dead.signal(signal.SIGKILL)
    until(lambda: not dead.members(), "P is gone")
    stack.prefills[0] = stack.start_prefill(0, dead.name)
    until(stack.prefills[0].is_ready, "P is back", START_TIMEOUT_S)
    seeds = iter(range(700, 800))

    def is_served() -> bool:
        prompt = words(300, seed=next(seeds))
        try:
            answer = stack.answer(prompt)
        except openai.APIError:
            return False
        assert answer.text == stack.right(prompt)
        push = stack.push(answer.id)
        return (push.engine_id, push.outcome) == (dead.name, "completed")

    until(is_served, "the P that came back pushes again")


@patient
def test_a_p_that_drains_finishes_its_requests(stack: Stack) -> None:
    """The last test: D gets the KV of requests that P had before it was told to end."""
    p, d = stack.prefills[1], stack.decode
    prompts = [make_prompt(length, seed, SHAPE.vocabulary) for seed, length in enumerate((1200, 300))]
    (server,) = map(int, re.findall(r"APIServer pid=(\d+)", said(p))[:1])
    before = len(said(d))

    def requests() -> float:
        return metric(p.url, "vllm:num_requests_running{") + metric(p.url, "vllm:num_requests_waiting{")

    async def run() -> tuple[list[Completed], list[Completed]]:
        async with aiohttp.ClientSession() as session:
            right = [await complete(session, d, prompt, 8) for prompt in prompts]
            asked = [asyncio.create_task(complete_disaggregated(session, p, d, prompt, 8)) for prompt in prompts]
            await asyncio.to_thread(until, lambda: requests() == len(prompts), "P has them all")
            os.kill(server, signal.SIGTERM)
            await asyncio.to_thread(until, lambda: "draining in-flight requests" in said(p), "it drains")
            with pytest.raises(RequestFailedError):
                await complete(session, p, prompts[0], 1)
            return right, await asyncio.gather(*asked)

    right, answers = asyncio.run(run())
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in right]
    until(lambda: "Application shutdown complete" in said(p), "P ends")
    assert "KV load of" not in said(d)[before:], "no load failed"


def said(engine: EngineServer) -> str:
    return engine.log_path.read_text()
