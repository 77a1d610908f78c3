"""A session's next request brings P the params that D returned with its last answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from layerpush.apps.proxy import conversations
from layerpush.apps.proxy.conversations import KEPT_S, Conversations
from layerpush.core.prefill_identity import TO_PREFILL
from tests.unit.proxy.world import World, asynchronous, world

SESSION = {"X-Session-Id": "talk"}
ANSWER = b'{"id": "1", "kv_transfer_params": {"remote_host": "d", "do_remote_decode": false}, "choices": [1.50]}'
WHO = ("key", "talk")


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
    assert kept.pop_params(("", "talk"), 6.0) == kept.pop_params(None, 6.0) == TO_PREFILL
    assert kept.pop_params(WHO, 6.0) == {"remote_host": "d", **TO_PREFILL}
    assert kept.pop_params(WHO, 6.0) == TO_PREFILL
    kept.without_params(WHO, ANSWER, 5.0)
    assert kept.pop_params(WHO, 5.0 + KEPT_S) == TO_PREFILL


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
    assert kept.pop_params(WHO, 0.0) == TO_PREFILL


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@asynchronous
async def test_params_in_an_event_are_found_in_any_split(size: int) -> None:
    kept, sent = Conversations(), b": ping\n\ndata: {}\n\ndata: " + ANSWER + b"\r\n\r\ndata: kv_transfer_params"

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(sent), size):
            yield sent[at : at + size]

    shown = b"".join([data async for data in kept.shown(WHO, pieces())])
    assert shown == sent.replace(ANSWER + b"\r", b'{"id":"1","kv_transfer_params":null,"choices":[1.50]}')
    now = asyncio.get_running_loop().time()
    assert kept.pop_params(WHO, now) == {"remote_host": "d", **TO_PREFILL}


@asynchronous
async def test_a_long_line_passes_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LINE_BYTES", 8)

    async def pieces() -> AsyncIterator[bytes]:
        for data in (b"data: [1", b"2", b"3", b"]\n"):
            yield data

    assert [data async for data in Conversations().shown(WHO, pieces())] == [b"", b"data: [12", b"", b"3]\n", b""]


def test_the_oldest_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "KEPT", 2)
    kept = Conversations()
    for name in "abc":
        kept.without_params(("", name), ANSWER, 0.0)
    assert [kept.pop_params(("", name), 0.0) == TO_PREFILL for name in "abc"] == [True, False, False]
