"""P with ``answer_early`` behind routers that ask P first and then D: P pushes by layer all the same."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.servers.engines import EngineGroup, EngineServer, no_proxy
from bench.servers.interrupts import Interrupts
from bench.servers.load import make_prompt
from bench.servers.ports import PortAllocator
from tests.e2e.proxyrig import (
    DEADLINE_S,
    MODEL,
    SHAPE,
    WORDS,
    ask_and_leave,
    client_of,
    has_a_request,
    metric,
    model_with_tokenizer,
    push_of,
    server_spec,
    until,
    words,
)
from tests.e2e.servedrig import scrape, wait_for
from tests.e2e.test_vllm_router import ROOT, router
from tests.support.ports import EARLY_ANSWER_PORTS

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
TO_P = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""The parameters for P from these routers."""
SERIAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AIBrix": ({"stream": False, "extra_body": {"max_completion_tokens": 1}}, {"remote_host": "127.0.0.1"}),
    "llm-d's nixlv2": (
        {"stream": False, "extra_body": {"max_completion_tokens": 1, "max_output_tokens": 1, "min_tokens": 1}},
        {},
    ),
}
"""Additions of sequential routers to P's body, and their changes in P's params for D."""
SCALE_OUT = "--enable-scale-out"
"""P's server has ``/inference/v1/generate``."""
TOKENS, LONG = 1000, 2000
patient = pytest.mark.timeout(600)


@dataclass
class Pair:
    """A P and a D. P's answers without a transfer are the right ones."""

    scratch: Path
    ports: PortAllocator
    prefill: EngineServer
    decode: EngineServer

    def right(self, prompt: str | list[int]) -> str:
        alone = GREEDY | {"extra_body": {"ignore_eos": True}}
        return str(client_of(self.prefill.url).completions.create(prompt=prompt, **alone).choices[0].text)

    def answer_of_p(self, prompt: Any, request_id: str, *, chat: bool = False, **changes: Any) -> dict[str, Any]:
        """P's answer to a router that asks for one token."""
        client, asked = client_of(self.prefill.url), GREEDY | {"max_tokens": 1} | changes
        extra = {"ignore_eos": True, "kv_transfer_params": TO_P} | asked.pop("extra_body", {})
        headers = {"X-Request-Id": request_id}
        if chat:
            messages: Any = [{"role": "user", "content": prompt}]
            said: Any = client.chat.completions.create(
                messages=messages, extra_headers=headers, extra_body=extra, **asked
            )
        else:
            said = client.completions.create(prompt=prompt, extra_headers=headers, extra_body=extra, **asked)
        return dict(said.to_dict())

    def tokens_of_p(self, prompt: list[int]) -> dict[str, Any]:
        """P's answer to a program that asks for one token. vLLM's server calls ``AsyncLLM.generate`` for it with the
        program's own sampling params, as SMG's and Dynamo's servers do.
        """
        sampling = {"max_tokens": 1, "temperature": 0}
        body = {"token_ids": prompt, "sampling_params": sampling, "kv_transfer_params": TO_P}
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.prefill.url}/inference/v1/generate", json.dumps(body).encode(), headers)
        with no_proxy.open(asked, timeout=DEADLINE_S) as response:
            return dict(json.load(response))

    def answer_of_d(self, prompt: str | list[int], request_id: str, params: dict[str, Any]) -> str:
        extra = {"ignore_eos": True, "kv_transfer_params": params}
        said = client_of(self.decode.url).completions.create(
            prompt=prompt, extra_headers={"X-Request-Id": request_id}, extra_body=extra, **GREEDY
        )
        return said.choices[0].text

    @property
    def trace_dir(self) -> Path:
        return self.scratch / "trace"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    scratch = tmp_path_factory.mktemp("early")
    model, ports = model_with_tokenizer(scratch / "model"), PortAllocator(EARLY_ANSWER_PORTS)
    extra: dict[str, object] = {"answer_early": True, "trace_dir": str(scratch / "trace")}
    with Interrupts() as interrupts, EngineGroup(scratch, interrupts, ports) as group:
        prefill = group.start(server_spec("prefill", "prefill", model, WORDS, SCALE_OUT, extra=extra))
        decode = group.start(server_spec("decode", "decode", model, WORDS))
        group.wait_ready([prefill, decode])
        running = Pair(scratch, ports, prefill, decode)
        warm_up = str(uuid.uuid4())  # P and D connect when they first meet
        answer = running.answer_of_p(words(50, seed=1), warm_up)
        running.answer_of_d(words(50, seed=1), warm_up, answer["kv_transfer_params"])
        yield running


def answered(pair: Pair) -> float:
    return scrape(pair.prefill).value("early_answers_total", event="answered")


@patient
@pytest.mark.parametrize("router", SERIAL)
def test_p_pushes_by_layer_behind_a_sequential_router(pair: Pair, router: str) -> None:
    more, changed = SERIAL[router]
    before, request_id = answered(pair), str(uuid.uuid4())
    prompt = words(TOKENS, seed=20 + list(SERIAL).index(router))
    answer = pair.answer_of_p(prompt, request_id, **more)
    params = answer["kv_transfer_params"]
    assert pair.answer_of_d(prompt, request_id, params | changed) == pair.right(prompt)
    push = push_of(pair.trace_dir, request_id)
    assert (push.mode, push.fallback, push.outcome) == ("auto", None, "completed")
    assert params["remote_request_id"] == push.request_id
    assert (params["transfer_mode"], params["remote_block_ids"]) == ("push", [])
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (TOKENS, 0)
    until(lambda: answered(pair) == before + 1, "it is counted")


@patient
def test_p_pushes_by_layer_for_a_program_that_calls_the_engine_itself(pair: Pair) -> None:
    before, prompt = answered(pair), make_prompt(TOKENS, 21, SHAPE.vocabulary)
    answer = pair.tokens_of_p(prompt)
    assert answer["choices"][0]["token_ids"] == []
    params = answer["kv_transfer_params"]
    assert pair.answer_of_d(prompt, str(uuid.uuid4()), params) == pair.right(prompt)
    push = push_of(pair.trace_dir, params["remote_request_id"])
    assert (push.mode, push.fallback, push.outcome) == ("auto", None, "completed")
    until(lambda: answered(pair) == before + 1, "it is counted")


@patient
def test_a_chat_is_answered_early(pair: Pair) -> None:
    before = answered(pair)
    answer = pair.answer_of_p(words(TOKENS, seed=3), str(uuid.uuid4()), chat=True)
    assert answer["choices"][0]["message"]["content"] in ("", None)
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True
    until(lambda: answered(pair) == before + 1, "it is counted")


@patient
def test_p_pushes_the_first_request_of_vllm_router_by_layer(pair: Pair) -> None:
    """The router is sequential until it knows P."""
    subprocess.run([ROOT / "scripts" / "vllm-router"], check=True)
    prompt = words(TOKENS, seed=4)
    engines = {"10.0.0.1": pair.prefill.url, "10.0.0.2": pair.decode.url}
    with router(pair.scratch, pair.ports, "docs/routers.md", engines) as url:
        alone = GREEDY | {"extra_body": {"ignore_eos": True}}
        answer = client_of(url).completions.create(prompt=prompt, **alone)
    assert answer.choices[0].text == pair.right(prompt)
    push = push_of(pair.trace_dir, answer.id)
    assert (push.mode, push.fallback, push.outcome) == ("auto", None, "completed")


@patient
def test_a_request_for_more_of_the_answer_gets_it_whole(pair: Pair) -> None:
    """tests/unit/test_early_answer.py has all such requests."""
    before = answered(pair)
    answer = pair.answer_of_p(words(60, seed=5), str(uuid.uuid4()), logprobs=1)
    assert answer["usage"]["completion_tokens"] > 0
    assert answered(pair) == before


@patient
@pytest.mark.parametrize(
    ("prompt", "changes", "says"),
    [
        (words(5000, seed=8), {}, "maximum context length"),
        (
            words(60, seed=8),
            {"extra_body": {"kv_transfer_params": TO_P | {"layerpush_mode": "fast"}}},
            "layerpush_mode",
        ),
    ],
    ids=["too long", "bad params"],
)
def test_inadmissible_requests_are_refused(pair: Pair, prompt: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        pair.answer_of_p(prompt, str(uuid.uuid4()), **changes)


@patient
def test_an_id_that_d_would_refuse_is_refused(pair: Pair) -> None:
    with pytest.raises(openai.BadRequestError, match="1 to 1008 printable characters"):
        pair.answer_of_p(words(60, seed=8), "x" * 1009)
    assert not has_a_request(pair.prefill.url)


@patient
def test_a_disconnect_from_d_stops_ps_prefill(pair: Pair) -> None:
    """P's client is the router, which has its answer already. No other client could abort P's request."""
    withdrawn = scrape(pair.prefill).value("early_answers_total", event="withdrawn")
    prompt, request_id = words(LONG, seed=9), str(uuid.uuid4())
    params = pair.answer_of_p(prompt, request_id)["kv_transfer_params"]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "kv_transfer_params": params}
    ask_and_leave(pair.decode.url, body, lambda: has_a_request(pair.decode.url), **{"X-Request-Id": request_id})
    wait_for(pair.prefill, "early_answers_total", withdrawn + 1, event="withdrawn")
    until(lambda: metric(pair.prefill.url, "vllm:num_requests_running") == 0, "P computes nothing")
    assert push_of(pair.trace_dir, request_id).outcome == "cancelled"
    again, request_id = words(100, seed=10), str(uuid.uuid4())
    params = pair.answer_of_p(again, request_id)["kv_transfer_params"]
    assert pair.answer_of_d(again, request_id, params) == pair.right(again)


@patient
def test_p_dies_after_it_has_answered(pair: Pair) -> None:
    """D's load fails within its deadlines. By D's `kv_load_failure_policy` the client gets an error."""
    prompt, request_id = words(LONG, seed=11), str(uuid.uuid4())
    params = pair.answer_of_p(prompt, request_id)["kv_transfer_params"]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(pair.answer_of_d, prompt, request_id, params)
        until(lambda: scrape(pair.decode).value("awaited_loads") > 0, "D awaits its push")
        pair.prefill.signal(signal.SIGKILL)
        with pytest.raises(openai.InternalServerError):
            asking.result()
