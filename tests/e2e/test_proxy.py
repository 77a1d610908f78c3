"""`layerpush proxy` before real engines, with the official client: tokens, layers, faults.

Their order matters: later tests end engines.
"""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from bench.figures import read_pushes
from bench.serve.scrape import Meter
from bench.servers.engines import EngineServer
from layerpush.core.prefill_identity import TO_PREFILL, PrefillIdentity
from layerpush.telemetry.metrics.catalog import FIRST_TOKENS
from tests.e2e.docscripts import keys_that_p_answers
from tests.e2e.proxyrig import (
    DEADLINE_S,
    HALVES,
    MODEL,
    ProxyProcess,
    Rig,
    client_of,
    health,
    id_of,
    metric,
    proxy,
    push_of,
    rig,
    until,
    words,
)
from tests.e2e.servedrig import scrape

ANSWER = 6
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": ANSWER, "extra_body": {"ignore_eos": True}}
TOKENS = 1000
LONG = 2000
patient = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("proxy")) as running:
        yield running
        check_pushes(running)


def check_pushes(servers: Rig) -> None:
    """Of all pushes of this module at most one has failed: the one to a D that died before the first token."""
    failed = [push for push in read_pushes(servers.trace_dir) if push.outcome != "completed"]
    assert [push.engine_id for push in failed] in ([], [servers.prefill.name]), failed


def expected(servers: Rig, prompt: str, **changes: Any) -> str:
    """The answer of P alone."""
    return str(servers.expected.completions.create(prompt=prompt, **GREEDY | changes).choices[0].text)


def assert_pushed_by_layer(servers: Rig, answer_id: str) -> None:
    push = push_of(servers.trace_dir, id_of(answer_id))
    assert (push.mode, push.fallback, push.outcome) == ("auto", None, "completed")
    assert push.engine_id == servers.prefill.name
    assert push.hooked_layers > 0


@patient
def test_completions_are_right_and_pushed_by_layer(servers: Rig) -> None:
    text = words(TOKENS, seed=1)
    answer = servers.client.completions.create(prompt=text, **GREEDY)
    assert answer.choices[0].text == expected(servers, text)
    assert_pushed_by_layer(servers, answer.id)
    servers.await_idle()


@patient
def test_a_corrupt_answer_is_noticed(servers: Rig) -> None:
    """The negative control: other tests compare texts. This proves something only if texts can differ."""
    text = words(300, seed=67)
    with servers.proxy(module="tests.e2e.corruptproxy") as proxy:
        corrupt = proxy.client.completions.create(prompt=text, **GREEDY | {"max_tokens": 12}).choices[0].text
    right = expected(servers, text, max_tokens=12)
    assert " w1" in right, "there is nothing to corrupt"
    assert corrupt == right.replace(" w1", " w2")


@patient
def test_different_prompts_have_different_answers(servers: Rig) -> None:
    """With the blocks of another prompt, D's answer would be another one."""
    assert len({expected(servers, words(300, seed=seed)) for seed in (68, 69, 70)}) == 3


@patient
def test_chat(servers: Rig) -> None:
    arguments: dict[str, Any] = GREEDY | {"messages": [{"role": "user", "content": words(TOKENS, seed=3)}]}
    right = servers.expected.chat.completions.create(**arguments).choices[0].message.content
    events = list(
        servers.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    )
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == right
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == ANSWER
    assert_pushed_by_layer(servers, events[0].id)


@patient
def test_several_answers_and_several_prompts(servers: Rig) -> None:
    """vLLM makes a request of each. P and D must agree on the ids of these requests."""
    sampled = GREEDY | {"temperature": 1.0, "n": 2}
    answer = servers.client.completions.create(prompt=words(300, seed=4), **sampled)
    assert len(answer.choices) == 2
    one, other = words(300, seed=5), words(400, seed=6)
    right = {prompt: expected(servers, prompt) for prompt in (one, other)}
    answer = servers.client.completions.create(prompt=[other, one, one], **GREEDY)
    assert [choice.text for choice in answer.choices] == [right[prompt] for prompt in (other, one, one)]
    servers.await_idle()


@pytest.fixture(scope="module")
def starts_on_p(servers: Rig) -> Iterator[ProxyProcess]:
    """A proxy whose only D starts its answers with P's token. It knows P."""
    with proxy(servers.scratch, servers.ports.next_free(), servers.prefill, servers.decodes[1:]) as served:
        served.client.completions.create(prompt="w5 w6", **GREEDY)
        yield served


@contextlib.contextmanager
def first_tokens(servers: Rig, **more: int) -> Iterator[None]:
    """Check the origins of the first tokens of the second D's answers meanwhile, and their numbers."""
    before = origins(servers)
    yield
    until(lambda: origins(servers) == before + Counter(more), f"first tokens of {more}")


def origins(servers: Rig) -> Counter[str]:
    found = scrape(servers.decodes[1])
    counts = Counter({origin: int(found.value("first_tokens_total", origin=origin)) for origin in FIRST_TOKENS.values})
    counts["prefill"] += counts.pop("late")  # on a busy machine a token may be late
    return +counts


@patient
def test_answers_that_start_with_p_s_token(servers: Rig, starts_on_p: ProxyProcess) -> None:
    """The client sees the same text and the same counts, whole and as a stream."""
    text, changes = words(300, seed=206), GREEDY
    right = servers.expected.completions.create(prompt=text, **changes)
    with first_tokens(servers, prefill=2):
        whole = starts_on_p.client.completions.create(prompt=text, **changes)
        events = list(
            starts_on_p.client.completions.create(
                prompt=text, stream=True, stream_options={"include_usage": True}, **changes
            )
        )
    streamed = [event for event in events if event.choices]
    assert whole.choices[0].text == "".join(event.choices[0].text for event in streamed) == right.choices[0].text
    assert streamed[0].choices[0].text == f" {right.choices[0].text.split()[0]}"
    assert whole.choices[0].finish_reason == streamed[-1].choices[0].finish_reason == "length"
    for usage in (whole.usage, events[-1].usage):
        assert usage is not None
        assert right.usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (300, right.usage.completion_tokens) == (300, ANSWER)


@patient
def test_stop_strings_in_and_after_p_s_token(servers: Rig, starts_on_p: ProxyProcess) -> None:
    text = words(300, seed=212)
    first, second, *_ = expected(servers, text).split()
    stops = [first[-1:] + " " + second[:2], first, second]
    with first_tokens(servers, prefill=len(stops)):
        for stop in stops:
            right = servers.expected.completions.create(prompt=text, stop=stop, **GREEDY)
            answer = starts_on_p.client.completions.create(prompt=text, stop=stop, **GREEDY)
            assert answer.choices[0].text == right.choices[0].text
            assert answer.choices[0].finish_reason == right.choices[0].finish_reason == "stop"


@patient
def test_a_letter_split_between_p_s_token_and_the_next(servers: Rig, starts_on_p: ProxyProcess) -> None:
    changes = GREEDY | {"extra_body": {"ignore_eos": True, "allowed_token_ids": list(HALVES)}}
    prompts = (words(40, seed=220 + seed) for seed in range(40))
    text = next(text for text in prompts if expected(servers, text, **changes | {"max_tokens": 2}) == "é")
    right = expected(servers, text, **changes)
    with first_tokens(servers, prefill=2):
        whole = starts_on_p.client.completions.create(prompt=text, **changes)
        events = list(starts_on_p.client.completions.create(prompt=text, stream=True, **changes))
    assert whole.choices[0].text == "".join(event.choices[0].text for event in events) == right


@patient
def test_a_conversation_of_vllms_multi_turn_client(servers: Rig, starts_on_p: ProxyProcess) -> None:
    """As `benchmarks/multi_turn` of vLLM's repository sends it, with ``--send-conversation-id --no-stream``."""
    messages: list[Any] = []
    sent = {"extra_headers": {"X-Session-ID": "7"}, "extra_body": {"ignore_eos": True, "conversation_id": "7"}}
    for turn in range(3):
        messages.append({"role": "user", "content": words(500, seed=230 + turn)})
        arguments: dict[str, Any] = GREEDY | {"messages": messages}
        right = servers.expected.chat.completions.create(**arguments).choices[0].message
        computed = Meter(servers.prefill.url, "vllm:prompt_tokens_by_source")
        answer = starts_on_p.client.chat.completions.create(**arguments | sent)
        assert answer.usage is not None
        assert answer.choices[0].message.content == right.content
        tokens = computed.since(answer.usage.prompt_tokens)
        kept = (answer.usage.prompt_tokens - 501) // servers.prefill.spec.block_size * servers.prefill.spec.block_size
        assert tokens["external_kv_transfer"] == max(0, kept)
        messages.append({"role": "assistant", "content": right.content})


@patient
def test_a_bad_request_is_refused_with_vllms_message(servers: Rig) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        servers.client.completions.create(prompt=[5] * 5000, **GREEDY)
    with pytest.raises(openai.NotFoundError, match="another"):
        servers.client.completions.create(prompt="w5", **GREEDY | {"model": "another"})
    servers.await_idle()


@patient
def test_a_disconnect_stops_both_engines(servers: Rig) -> None:
    arguments = GREEDY | {"max_tokens": 800}

    def computed() -> float:
        return sum(metric(engine.url, "vllm:generation_tokens_total") for engine in servers.decodes)

    before = computed()
    stream = servers.client.completions.create(prompt=words(300, seed=50), stream=True, **arguments)
    for _ in zip(range(2), stream, strict=False):
        pass
    stream.close()
    servers.await_idle()
    assert computed() < before + 800, "D goes on without its client"
    text = words(100, seed=52)
    assert servers.client.completions.create(prompt=text, **GREEDY).choices[0].text == expected(servers, text)


@patient
def test_ps_answer_has_the_keys_of_the_contract(servers: Rig) -> None:
    """P's answer has the keys of the page's table and vLLM's id from X-Request-Id. D gets the prompt with them."""
    text, request_id = words(100, seed=64), str(uuid.uuid4())
    arguments: dict[str, Any] = GREEDY | {"prompt": text, "extra_headers": {"X-Request-Id": request_id}}
    to_p = {"max_tokens": 1, "extra_body": {"kv_transfer_params": TO_PREFILL}}
    answer = client_of(servers.prefill.url).completions.create(**arguments | to_p)
    params = answer.to_dict()["kv_transfer_params"]
    assert isinstance(params, dict)
    assert params.keys() == keys_that_p_answers()
    assert params["remote_request_id"].startswith(f"cmpl-{request_id}-0-")
    assert PrefillIdentity.from_params(params) == PrefillIdentity(
        servers.prefill.name, "127.0.0.1", servers.prefill.side_channel_port, 1
    )
    assert (params["do_remote_prefill"], params["do_remote_decode"], params["transfer_mode"]) == (True, False, "push")
    to_d = {"extra_body": {"kv_transfer_params": params, "ignore_eos": True}}
    decoded = client_of(servers.decodes[0].url).completions.create(**arguments | to_d)
    assert decoded.id == answer.id == f"cmpl-{request_id}"
    assert decoded.choices[0].text == expected(servers, text)
    assert push_of(servers.trace_dir, request_id).outcome == "completed"


@patient
def test_requests_of_vllms_push_proxy_are_pushed_by_layer(servers: Rig) -> None:
    """Its remote_request_id is the bare id. Later versions send a transfer_id, too."""
    text, request_id = words(TOKENS, seed=65), str(uuid.uuid4())
    identity = PrefillIdentity(servers.prefill.name, "127.0.0.1", servers.prefill.side_channel_port, 1)
    to_d = identity.to_decode(request_id) | {"transfer_id": f"xfer-{uuid.uuid4()}"}

    def ask(engine: EngineServer, params: Mapping[str, Any], **changes: Any) -> str:
        body = {"ignore_eos": True, "kv_transfer_params": params}
        arguments = GREEDY | {"prompt": text, "extra_headers": {"X-Request-Id": request_id}, "extra_body": body}
        return str(client_of(engine.url).completions.create(**arguments | changes).choices[0].text)

    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(ask, servers.prefill, TO_PREFILL, max_tokens=1)
        answer = ask(servers.decodes[0], to_d)
        prefilled.result()
    assert answer == expected(servers, text)
    push = push_of(servers.trace_dir, request_id)
    assert (push.mode, push.outcome) == ("auto", "completed")


@patient
def test_the_push_of_a_proxys_own_question_completes(servers: Rig) -> None:
    """A proxy that does not know P asks it for its identity. A D takes the KV of this question."""

    def questions() -> dict[str, str]:
        return {push.request_id: push.outcome for push in read_pushes(servers.trace_dir) if "probe-" in push.request_id}

    before = questions()
    with servers.proxy() as another:
        another.client.completions.create(prompt=words(100, seed=66), **GREEDY)
    until(lambda: questions().keys() - before.keys(), "its push has ended")
    assert {outcome for request_id, outcome in questions().items() if request_id not in before} == {"completed"}


@patient
def test_a_dead_prefill_engine_fails_its_requests(servers: Rig) -> None:
    """Then another process takes P's address. The next tests do not need it yet."""
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(servers.client.completions.create, prompt=words(LONG, seed=70), **GREEDY)
        until(lambda: health(servers.url)["requests"], "it is under way")
        servers.prefill.signal(signal.SIGKILL)
        with pytest.raises(openai.InternalServerError, match="the prefill engine "):
            asking.result(DEADLINE_S)
    with pytest.raises(openai.InternalServerError, match="the prefill engine cannot be connected to"):
        servers.client.completions.create(prompt="w5 w6", **GREEDY)
    servers.restart_prefill("prefill-again")


@patient
def test_a_restarted_prefill_engine_with_another_name_is_used(servers: Rig) -> None:
    until(servers.prefill.is_ready, "P is back", 300)
    servers.introduce()
    text = words(TOKENS, seed=71)
    answer = servers.client.completions.create(prompt=text, **GREEDY)
    assert answer.choices[0].text == expected(servers, text)
    assert_pushed_by_layer(servers, answer.id)


@patient
def test_a_decode_engine_that_dies_before_the_first_token_is_replaced(servers: Rig) -> None:
    retries = health(servers.url)["retries"]
    text = words(LONG, seed=80)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(servers.client.completions.create, prompt=text, **GREEDY)
        until(servers.working_decode, "a D has it")
        victim = servers.working_decode()
        assert victim is not None
        victim.signal(signal.SIGKILL)
        answer = asking.result(DEADLINE_S)
    assert health(servers.url)["retries"] == retries + 1
    assert answer.choices[0].text == expected(servers, text)
    servers.decodes.remove(victim)
    assert push_of(servers.trace_dir, id_of(answer.id)).decode_engine_id == servers.decodes[0].name
    servers.await_idle()


@patient
def test_the_death_of_a_decode_engine_in_mid_answer_is_an_error(servers: Rig) -> None:
    """The last test: no D is left."""
    (victim,) = servers.decodes
    text = words(TOKENS, seed=81)
    right = expected(servers, text, max_tokens=100)
    stream = servers.client.completions.create(prompt=text, stream=True, **GREEDY | {"max_tokens": 2000})

    def read_on() -> str:
        return "".join(event.choices[0].text for event in stream)

    said = "".join(next(stream).choices[0].text for _ in range(3))
    assert said  # of any length: an event has all tokens since the event before
    assert right.startswith(said) or said.startswith(right)
    victim.signal(signal.SIGKILL)
    with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
        read_on()
    servers.decodes.remove(victim)
    servers.await_idle()
    with pytest.raises(openai.InternalServerError, match="the decode engine cannot be connected to"):
        servers.client.completions.create(prompt="w5 w6", **GREEDY)
