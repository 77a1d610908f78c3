"""Every endpoint that takes ``kv_transfer_params``, on real servers: its requests are pushed, and what one engine
refuses the other one hears of at once.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from bench.servers.engines import EngineGroup, EngineServer, no_proxy
from bench.servers.interrupts import Interrupts
from bench.servers.ports import PortAllocator
from layerpush.core.prefill_identity import TO_PREFILL
from layerpush.prefill.claims import REFUSED
from tests.e2e.proxyrig import DEADLINE_S, MODEL, WORDS, metric, model_with_tokenizer, server_spec, until, words
from tests.e2e.servedrig import scrape
from tests.support.ports import ENDPOINT_PORTS

LEASE_S = 480
"""P's blocks are not back before because a lease has ended."""
UNKNOWN_S = 480
"""Nor is a load over because no request has come."""
LONGEST_ON_P = 2048
GREEDY = {"model": MODEL, "temperature": 0}
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    """Decoded JSON, or the text of a stream."""


@dataclass
class Pair:
    """A P and a D. ``ask`` and ``to_d`` are a router's."""

    prefill: EngineServer
    decode: EngineServer
    pool: ThreadPoolExecutor

    def ask(self, server: EngineServer, path: str, body: Mapping[str, Any], request_id: str) -> Future[Answer]:
        return self.pool.submit(post, server.url + path, body, request_id)

    def prompt(self, path: str, seed: int, tokens: int = 300) -> dict[str, Any]:
        """A body with a prompt, for an answer of six tokens."""
        text = words(tokens, seed)
        match path:
            case "/v1/completions":
                return GREEDY | {"prompt": text, "max_tokens": 6}
            case "/v1/responses":
                return GREEDY | {"input": text, "max_output_tokens": 6, "store": False}
            case "/inference/v1/generate":
                token_ids = [int(word.removeprefix("w")) for word in text.split()]
                return {"token_ids": token_ids, "sampling_params": {"max_tokens": 6, "temperature": 0}}
        return GREEDY | {"messages": [{"role": "user", "content": text}], "max_tokens": 6}

    def to_p(self, body: Mapping[str, Any], **params: Any) -> dict[str, Any]:
        """A body for P: it asks for one token."""
        one = {key: 1 for key in ("max_tokens", "max_output_tokens") if key in body}
        if "sampling_params" in body:
            one["sampling_params"] = body["sampling_params"] | {"max_tokens": 1}
        return {**body, **one, "kv_transfer_params": {**TO_PREFILL, **params}}

    def to_d(self, **params: Any) -> dict[str, Any]:
        """D's params if both are asked at once."""
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "prefill",
            "remote_host": "127.0.0.1", "remote_port": self.prefill.side_channel_port, "tp_size": 1, **params,
        }  # fmt: skip

    @property
    def held(self) -> float:
        """The share of P's blocks that is not free."""
        return metric(self.prefill.url, "vllm:kv_cache_usage_perc")


def post(url: str, body: Mapping[str, Any], request_id: str) -> Answer:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with no_proxy.open(request, timeout=2 * DEADLINE_S) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return Answer(status, json.loads(text) if text.startswith("{") else text)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    scratch = tmp_path_factory.mktemp("endpoints")
    model = model_with_tokenizer(scratch / "model")
    extra: dict[str, object] = {"kv_lease_duration": LEASE_S, "unknown_request_timeout_s": UNKNOWN_S}
    options = WORDS, "--enable-scale-out"
    with (
        Interrupts() as interrupts,
        EngineGroup(scratch, interrupts, PortAllocator(ENDPOINT_PORTS)) as group,
        ThreadPoolExecutor(4) as pool,
    ):
        length = "--max-model-len", str(LONGEST_ON_P)
        prefill = group.start(server_spec("prefill", "prefill", model, *options, *length, extra=extra))
        decode = group.start(server_spec("decode", "decode", model, *options))
        group.wait_ready([prefill, decode])
        yield Pair(prefill, decode, pool)


def text_of(path: str, answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    match path:
        case "/v1/completions":
            return answer.body["choices"][0]["text"]
        case "/v1/chat/completions":
            return answer.body["choices"][0]["message"]["content"]
        case "/v1/responses":
            return answer.body["output"][0]["content"][0]["text"]
        case "/v1/messages":
            return answer.body["content"][0]["text"]
    return answer.body["choices"][0]["token_ids"]


ENDPOINTS = COMPLETIONS, CHAT, RESPONSES, MESSAGES, TOKENS
CASES = [*((path, order) for path in ENDPOINTS for order in ("at once", "one after the other")), (RESPONSES, "by name")]


@pytest.mark.parametrize(("path", "order"), CASES)
def test_prompts_of_every_endpoint_are_pushed(pair: Pair, path: str, order: str) -> None:
    """At once with a ``transfer_id``, and one after the other with P's answer. vLLM does not name a response by
    ``X-Request-Id``, but by the body's ``request_id``.
    """
    body, request_id, loads = pair.prompt(path, CASES.index((path, order))), str(uuid.uuid4()), loaded(pair)
    own = {"request_id": f"resp_{request_id}"} if order == "by name" else {}
    named = {"transfer_id": request_id} if order == "at once" else {}
    from_p = pair.ask(pair.prefill, path, pair.to_p({**body, **own}, **named), request_id)
    if order == "one after the other":
        params = from_p.result().body["kv_transfer_params"]
    else:
        params = pair.to_d(**(named or {"remote_request_id": f"resp_{request_id}_0"}))
    from_d = pair.ask(pair.decode, path, {**body, **own, "kv_transfer_params": params}, request_id).result()
    assert from_p.result().status == 200, from_p.result()
    assert text_of(path, from_d) == text_of(path, pair.ask(pair.decode, path, body, str(uuid.uuid4())).result())
    until(lambda: loaded(pair) == loads + 1, "the load is counted")
    until(lambda: pair.held == 0, "P's blocks are free")


def loaded(pair: Pair) -> float:
    return scrape(pair.decode).value("loads_total", outcome="loaded")


BAD_ON_D: dict[str, tuple[str, dict[str, Any]]] = {
    "too many tokens": (COMPLETIONS, {"max_tokens": 99_999}),
    "a bad regex": (COMPLETIONS, {"structured_outputs": {"regex": "["}}),
    "a bad regex of a stream": (COMPLETIONS, {"structured_outputs": {"regex": "["}, "stream": True}),
    "a bad type": (COMPLETIONS, {"max_tokens": "many"}),
    "two prompts": (COMPLETIONS, {"prompt": [words(100, 901), words(100, 902)], "max_tokens": 99_999}),
    "two answers": (COMPLETIONS, {"n": 2, "temperature": 1, "max_tokens": 99_999}),
    "a chat": (CHAT, {"max_tokens": 99_999}),
    "a streamed chat": (CHAT, {"structured_outputs": {"regex": "["}, "stream": True}),
    "a response": (RESPONSES, {"max_output_tokens": 99_999}),
    "tokens": (TOKENS, {"sampling_params": {"max_tokens": 6, "n": 9}}),
}
"""D's body differs from P's in these keys. P's has its prompts and its number of answers."""


@pytest.mark.parametrize("order", ["at once", "one after the other"])
@pytest.mark.parametrize("why", BAD_ON_D)
def test_p_frees_the_blocks_of_what_d_refuses(pair: Pair, why: str, order: str) -> None:
    path, bad = BAD_ON_D[why]
    body, request_id = pair.prompt(path, 100 + list(BAD_ON_D).index(why), tokens=1000), str(uuid.uuid4())
    shared = {key: bad[key] for key in ("prompt", "n", "temperature") if key in bad}
    named = {} if path == RESPONSES and order != "at once" else {"transfer_id": request_id}
    before = metric(pair.prefill.url, "vllm:request_success_total")
    from_p = pair.ask(pair.prefill, path, pair.to_p({**body, **shared}, **named), request_id)
    params = pair.to_d(**named) if order == "at once" else from_p.result().body["kv_transfer_params"]
    from_d = pair.ask(pair.decode, path, {**body, **bad, "kv_transfer_params": params}, request_id).result()
    assert from_d.status == 400 or '"code": 400' in from_d.body or '"code":400' in from_d.body, from_d
    assert from_p.result().status == 200, from_p.result().body
    until(lambda: metric(pair.prefill.url, "vllm:request_success_total") > before, "P has computed the prompt")
    until(lambda: pair.held == 0, "P's blocks are free")


BAD_ON_P: dict[str, tuple[str, dict[str, Any]]] = {
    "too long": (COMPLETIONS, {"prompt": words(LONGEST_ON_P + 100, 903)}),
    "two prompts": (COMPLETIONS, {"prompt": [words(LONGEST_ON_P + 100, 904), words(100, 905)]}),
    "two answers": (COMPLETIONS, {"prompt": words(LONGEST_ON_P + 100, 906), "n": 2, "temperature": 1}),
    "a bad type": (COMPLETIONS, {"top_p": "much"}),
    "bad params": (COMPLETIONS, {"kv_transfer_params": TO_PREFILL | {"layerpush_mode": "fast"}}),
    "a chat": (CHAT, {"max_tokens": 99_999}),
    "a response": (RESPONSES, {"max_output_tokens": 99_999}),
    "messages": (MESSAGES, {"max_tokens": 99_999}),
    "tokens": (TOKENS, {"sampling_params": {"max_tokens": 1, "n": 9}}),
}
"""P's body differs from D's in these keys, apart from its prompts and its number of answers."""


@pytest.mark.parametrize("why", BAD_ON_P)
def test_d_does_not_wait_for_what_p_refuses(pair: Pair, why: str) -> None:
    path, bad = BAD_ON_P[why]
    body, request_id = pair.prompt(path, 200 + list(BAD_ON_P).index(why)), str(uuid.uuid4())
    shared = {key: bad[key] for key in ("prompt", "n", "temperature") if key in bad}
    if path in (RESPONSES, TOKENS, MESSAGES):
        named = {"transfer_id": request_id}
    else:
        named = {"remote_request_id": f"cmpl-{request_id}-0" if path == COMPLETIONS else f"chatcmpl-{request_id}"}
    to_p = pair.to_p(body, **(named if "transfer_id" in named else {}))
    said = len(pair.decode.log_path.read_text())
    from_d = pair.ask(pair.decode, path, {**body, **shared, "kv_transfer_params": pair.to_d(**named)}, request_id)
    from_p = pair.ask(pair.prefill, path, {**to_p, **bad}, request_id)
    assert from_p.result().status == 400, from_p.result()
    assert from_d.result().status == 500, "kv_load_failure_policy is fail"
    assert REFUSED in pair.decode.log_path.read_text()[said:]
