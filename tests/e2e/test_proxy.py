"""`layerpush proxy` before real engines, with the official client: tokens, layers, faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from layerpush.demo.trace_figures import read_pushes
from layerpush.trace import PushRecord
from tests.e2e.proxyrig import MODEL, Rig, dispatch_of_prefill, dispatches, id_of, rig, until, words

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
TOKENS = 1200
patient = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("proxy")) as running:
        yield running


def push_of(servers: Rig, answer_id: str) -> PushRecord:
    """P's record of the push of a request's first prompt."""
    wanted = id_of(answer_id)

    def found() -> list[PushRecord]:
        return [push for push in read_pushes(servers.trace_dir) if wanted in push.request_id]

    until(found, f"a trace of {answer_id}")
    return found()[0]


@patient
@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_the_plain_engines_and_layers_stream(servers: Rig, stream: bool) -> None:
    text = words(TOKENS, seed=1 + stream)
    expected = servers.expected.completions.create(prompt=text, **GREEDY).choices[0].text
    answer = servers.client.completions.create(prompt=text, stream=stream, **GREEDY)
    events = list(answer) if isinstance(answer, openai.Stream) else [answer]
    assert "".join(event.choices[0].text for event in events) == expected
    push = push_of(servers, events[0].id)
    assert (push.mode, push.fallback, push.outcome) == ("layer", None, "completed")
    assert dispatches(servers, "sequential") == 0
    servers.await_idle()


@patient
def test_chat(servers: Rig) -> None:
    arguments: dict[str, Any] = GREEDY | {"messages": [{"role": "user", "content": words(TOKENS, seed=3)}]}
    expected = servers.expected.chat.completions.create(**arguments).choices[0].message.content
    events = list(
        servers.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    )
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == expected
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 12
    assert push_of(servers, events[0].id).mode == "layer"


@patient
def test_several_answers_and_several_prompts(servers: Rig) -> None:
    """vLLM makes a request of each, and P and D have to agree on their ids."""
    sampled = GREEDY | {"temperature": 1.0, "n": 2}
    answer = servers.client.completions.create(prompt=words(300, seed=4), **sampled)
    assert len(answer.choices) == 2
    prompts = [words(300, seed=5), words(400, seed=6)]
    expected = [choice.text for choice in servers.expected.completions.create(prompt=prompts, **GREEDY).choices]
    answer = servers.client.completions.create(prompt=prompts, **GREEDY)
    assert [choice.text for choice in answer.choices] == expected
    servers.await_idle()


@patient
@pytest.mark.parametrize(
    "alone", [{"prompt_logprobs": 1}, {"use_beam_search": True}, {"echo": True}, {"truncate_prompt_tokens": -1}]
)
def test_what_d_computes_itself(servers: Rig, alone: dict[str, Any]) -> None:
    arguments = GREEDY | {"extra_body": alone, "logprobs": 1 if "echo" in alone else None}
    if "use_beam_search" in alone:
        arguments["n"] = 2
    before = dispatches(servers, "alone")
    text = words(100, seed=7)
    expected = servers.expected.completions.create(prompt=text, **arguments).choices[0].text
    assert servers.client.completions.create(prompt=text, **arguments).choices[0].text == expected
    assert dispatches(servers, "alone") == before + 1


@patient
def test_many_at_once(servers: Rig) -> None:
    texts = [words(200 + 20 * index, seed=20 + index) for index in range(12)]
    expected = [servers.expected.completions.create(prompt=text, **GREEDY).choices[0].text for text in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: servers.client.completions.create(prompt=text, **GREEDY), texts))
    assert [answer.choices[0].text for answer in answers] == expected
    servers.await_idle()


@patient
def test_a_bad_request_is_refused_with_vllms_message(servers: Rig) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        servers.client.completions.create(prompt=words(3000, seed=40), **GREEDY)
    with pytest.raises(openai.NotFoundError, match="another"):
        servers.client.completions.create(prompt="w5", **GREEDY | {"model": "another"})
    servers.await_idle()


@patient
@pytest.mark.parametrize("tokens", [0, 2])
def test_a_client_that_leaves_stops_both_engines(servers: Rig, tokens: int) -> None:
    arguments = GREEDY | {"max_tokens": 800}
    if tokens:
        stream = servers.client.completions.create(prompt=words(TOKENS, seed=50), stream=True, **arguments)
        for _ in zip(range(tokens), stream, strict=False):
            pass
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            servers.client.with_options(timeout=0.3).completions.create(prompt=words(TOKENS, seed=51), **arguments)
    servers.await_idle()
    text = words(100, seed=52)
    expected = servers.expected.completions.create(prompt=text, **GREEDY).choices[0].text
    assert servers.client.completions.create(prompt=text, **GREEDY).choices[0].text == expected


@patient
def test_a_prefill_engine_that_dies_and_comes_back_under_another_name(servers: Rig) -> None:
    """The last test: it leaves another P behind."""
    failures: list[openai.APIError] = []

    def ask() -> None:
        try:
            servers.client.completions.create(prompt=words(2000, seed=60), **GREEDY)
        except openai.APIError as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: dispatches(servers, "concurrent"), "it is under way")
    servers.kill_prefill()
    asking.join(60)
    assert not asking.is_alive(), "it waits for a P that is gone"
    for error in failures:  # none, if the prompt was through before the end of P
        assert isinstance(error, openai.InternalServerError)
        assert servers.prefill.url in str(error)
    with pytest.raises(openai.InternalServerError, match=r"no healthy prefill instance|cannot be connected"):
        servers.client.completions.create(prompt="w5 w6", **GREEDY)
    servers.restart_prefill("prefill-again")
    until(lambda: dispatch_of_prefill(servers) == "concurrent", "the proxy knows who P is now")
    text = words(TOKENS, seed=61)
    expected = servers.expected.completions.create(prompt=text, **GREEDY).choices[0].text
    answer = servers.client.completions.create(prompt=text, **GREEDY)
    assert answer.choices[0].text == expected
    push = push_of(servers, answer.id)
    assert (push.engine_id, push.mode) == ("prefill-again", "layer")
