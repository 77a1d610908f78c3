"""A session's next request brings P the params that D returned with its last answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from layerpush.apps.proxy import conversations
from layerpush.apps.proxy.conversations import KEPT_S, Conversations, Session
from layerpush.apps.proxy.legs import HELD_BYTES
from layerpush.core.prefill_identity import TO_PREFILL
from tests.unit.proxy.world import World, asynchronous, world

SESSION = {"X-Session-Id": "talk"}
ANSWER = b'{"id": "1", "kv_transfer_params": {"remote_host": "d", "do_remote_decode": false}, "choices": [1.50]}'
SAID = b'[{"role":"user","content":"a"}]'
WHO = Session.of(("key", b"", "talk"), SAID)


def to_p(here: World) -> list[dict[str, Any]]:
    """P's params of each request."""
    return [seen.params for seen in here.p.seen]


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_p_gets_the_params_of_the_sessions_last_turn(stream: bool) -> None:
    async with world(d0={"keeps_turns": True}) as here:
        for _ in range(3):
            reply = await here.post(headers=SESSION, stream=stream)
            assert b'"kv_transfer_params":null' in reply.body
            assert b"127.0.0.1" not in reply.body, "a client sees no engine's address"
            assert reply.body.endswith(b"}\n\ndata: [DONE]\n\n" if stream else b"}")
        first, *others = to_p(here)
        assert first == TO_PREFILL
        for params, before in zip(others, here.d.seen, strict=False):
            assert params["remote_request_id"] == f"cmpl-{before.request_id}-0-suffix"
            assert params["remote_prefixes"] == "0123abcd"
            assert {key: params[key] for key in TO_PREFILL} == TO_PREFILL
        assert all(not seen.params.get("do_remote_decode") for seen in here.d.seen)
        assert all(seen.params == TO_PREFILL for seen in here.p.probes)


@pytest.mark.parametrize(
    "headers", [None, {"X-Session-Id": "other"}, {"X-Session-Id": ""}, {**SESSION, "Authorization": "Bearer other"}]
)
@asynchronous
async def test_no_other_request_gets_them(headers: dict[str, str] | None) -> None:
    async with world(d0={"keeps_turns": True}) as here:
        await here.post(headers=SESSION)
        reply = await here.post(headers=headers)
        assert b"127.0.0.1" not in reply.body
        assert to_p(here) == [TO_PREFILL, TO_PREFILL]


@pytest.mark.parametrize("headers", [None, {"X-Session-Id": ""}])
@asynchronous
async def test_requests_without_a_session_share_none(headers: dict[str, str] | None) -> None:
    async with world(d0={"keeps_turns": True}) as here:
        for _ in range(2):
            await here.post(headers=headers)
        assert to_p(here) == [TO_PREFILL, TO_PREFILL]


@asynchronous
async def test_a_question_to_p_brings_none() -> None:
    async with world(d0={"keeps_turns": True}) as here:
        await here.post(headers=SESSION)
        prefill, _ = here.engines
        prefill.identity = prefill.asked_at = None
        asked = len(here.p.probes)
        await here.post(headers=SESSION)
        assert [seen.params for seen in here.p.probes[asked:]] == [TO_PREFILL]


@asynchronous
async def test_another_attempt_brings_them_too() -> None:
    async with world(2, d0={"keeps_turns": True}) as here:
        await here.post(headers=SESSION)
        for prefill in here.prefill:
            prefill.faults.append("500")
        await here.post(headers=SESSION)
        later = [seen.params for prefill in here.prefill for seen in prefill.seen if seen.params != TO_PREFILL]
        assert len(later) > 1
        assert all(params == later[0] for params in later)


def test_params_are_used_once_and_get_old() -> None:
    kept = Conversations()
    shown = kept.without_params(WHO, ANSWER, 5.0)
    assert shown == b'{"id":"1","kv_transfer_params":null,"choices":[1.50]}'
    for other in (None, Session.of(("", b"", "talk"), SAID), Session.of(("key", b'"salt"', "talk"), SAID)):
        assert kept.pop_params(other, SAID, 6.0) == TO_PREFILL
    assert kept.pop_params(WHO, SAID, 6.0) == {"remote_host": "d", **TO_PREFILL}
    assert kept.pop_params(WHO, SAID, 6.0) == TO_PREFILL
    kept.without_params(WHO, ANSWER, 5.0)
    assert kept.pop_params(WHO, SAID, 5.0 + KEPT_S) == TO_PREFILL


@pytest.mark.parametrize(
    ("said", "later", "is_it"),
    [
        (SAID, SAID, True),
        (SAID, SAID[:-1] + b',{"role":"assistant","content":"b"},{"role":"user","content":"c"}]', True),
        (b"[ 1, 2\n]", b"[ 1, 2, 3\n]", True),
        (b'"Hello"', b'"Hello there"', True),
        (SAID, b'[{"role":"user","content":"b"}]', False),
        (SAID, b"[]", False),
        (b'"Hello there"', b'"Hello"', False),
        (b'"Hello"', b"", False),
    ],
)
def test_only_the_same_conversation_gets_and_takes_them(said: bytes, later: bytes, is_it: bool) -> None:
    kept = Conversations()
    kept.without_params(Session.of(WHO.who, said), ANSWER, 5.0)
    found = kept.pop_params(Session.of(WHO.who, later), later, 6.0)
    assert found == ({"remote_host": "d", **TO_PREFILL} if is_it else TO_PREFILL)
    assert (kept.pop_params(WHO, said, 6.0) == TO_PREFILL) == is_it


@pytest.mark.parametrize("key", [{}, {"Authorization": "Bearer one-key-for-all"}])
@asynchronous
async def test_the_name_of_anothers_session_is_worth_nothing(key: dict[str, str]) -> None:
    """Neither to who guesses it, nor to who has used it first."""
    async with world(d0={"keeps_turns": True}) as here:
        for prompt in ("hers", "his", "hers, again"):
            await here.post(headers=SESSION | key, prompt=prompt)
        assert to_p(here) == [TO_PREFILL] * 3
        await here.post("/v1/chat/completions", headers=SESSION | key, prompt="hers, again")
        assert to_p(here)[3] == TO_PREFILL


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no json",
        b"[]",
        b'{"a": 1}',
        b'{ "kv_transfer_params" : null }',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": "x"}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_other_answers_pass_byte_for_byte(answer: bytes) -> None:
    kept = Conversations()
    assert kept.without_params(WHO, answer, 0.0) == answer
    assert kept.pop_params(WHO, SAID, 0.0) == TO_PREFILL


async def shown(kept: Conversations, *pieces: bytes) -> list[bytes]:
    async def stream() -> AsyncIterator[bytes]:
        for data in pieces:
            yield data

    return [data async for data in kept.shown(WHO, stream())]


@pytest.mark.parametrize("around", [(b": ping\n\ndata: {}\n\ndata: ", b"\r\n\r\ndata: kv_transfer_params"), (b"", b"")])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@asynchronous
async def test_params_in_a_stream_are_found_in_any_split(size: int, around: tuple[bytes, bytes]) -> None:
    kept = Conversations()
    answer = ANSWER.replace(b'"1"', '"é \\"kv_transfer_params\\": {"'.encode())
    sent = answer.join(around)
    data = b"".join(await shown(kept, *(sent[at : at + size] for at in range(0, len(sent), size))))
    begin, end = answer.index(b'"kv_transfer_params": {"r'), answer.index(b', "choices"')
    assert data == (answer[:begin] + b'"kv_transfer_params":null' + answer[end:]).join(around)
    now = asyncio.get_running_loop().time()
    assert kept.pop_params(WHO, SAID, now)["remote_host"] == "d"


@asynchronous
async def test_a_stream_passes_as_it_comes() -> None:
    """Only the begin of params waits. Params that are not whole do not pass."""
    pieces = (b'data: {"kv', b'_transfer_params":null}', b'{"kv_transfer_params": -1', b'"kv_tr')
    expected = [b"data: {", b'"kv_transfer_params":null}', b'{"kv_transfer_params": -1', b"", b'"kv_tr']
    assert await shown(Conversations(), *pieces) == expected
    assert await shown(Conversations(), b'{"a":1,"kv_transfer_params":{"remote_host":"d') == [b'{"a":1,']


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_a_long_answer_names_no_engine(stream: bool) -> None:
    async with world(d0={"keeps_turns": True, "padding": "x" * 2 * HELD_BYTES}) as here:
        reply = await here.post(headers=SESSION, stream=stream)
        assert len(reply.body) > 2 * HELD_BYTES
        assert b"127.0.0.1" not in reply.body
        assert b"suffix" not in reply.body
        await here.post(headers=SESSION, stream=stream)
        assert "remote_request_id" in to_p(here)[1]


def test_the_oldest_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "KEPT", 2)
    kept = Conversations()
    for name in "abc":
        kept.without_params(Session.of(("", b"", name), SAID), ANSWER, 0.0)
    asked = [Session.of(("", b"", name), SAID) for name in "abc"]
    assert [kept.pop_params(session, SAID, 0.0) == TO_PREFILL for session in asked] == [True, False, False]
