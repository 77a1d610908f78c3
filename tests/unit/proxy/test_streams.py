"""The client gets D's answer as D wrote it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable

import aiohttp
import pytest

from tests.unit.proxy.world import asynchronous, until, world


@asynchronous
async def test_a_stream_equals_ds_stream_byte_for_byte() -> None:
    async with world() as here:
        reply = await here.post(stream=True, stream_options={"include_usage": True})
        (at_d,) = here.d.seen
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert reply.body == here.d.sent[at_d.request_id]
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert b'"usage": {"prompt_tokens": 3' in reply.body
        (at_p,) = here.p.seen
        assert "stream" not in at_p.body
        assert "stream_options" not in at_p.body


@asynchronous
async def test_a_stream_is_the_same_for_any_split_into_pieces() -> None:
    text = "data: ä\r\n: c\n\ndata: {}\n\n\n\ndata: x\n\ndata: no end".encode()
    async with world() as here:
        for size in (1, 3, 7, len(text)):
            here.d.pieces = [text[start : start + size] for start in range(0, len(text), size)]
            assert (await here.post(stream=True)).body == text


@asynchronous
async def test_each_token_is_passed_on_when_it_comes() -> None:
    async with world() as here:
        here.d.step = asyncio.Semaphore(0)
        here.d.step.release()
        async with here.stream() as response:
            for index in range(3):
                assert f"t{index} ".encode() in await response.content.readuntil(b"\n\n")
                here.d.step.release()
            assert await response.content.read(5) == b"data:"


@asynchronous
async def test_a_whole_answer_equals_ds_answer_byte_for_byte() -> None:
    async with world() as here:
        reply = await here.post()
        (at_d,) = here.d.seen
        assert reply.body == here.d.sent[at_d.request_id]
        assert reply.headers["Content-Type"] == "application/json"
        assert reply.headers["X-Engine"] == "d0"
        assert reply.headers["Content-Length"] == str(len(reply.body))


@asynchronous
async def test_headers_equal_ds_headers_byte_for_byte() -> None:
    async with world() as here:
        here.d.greeting = " is über"
        async with here.session.post(f"{here.url}/v1/completions", json={"model": "stub", "prompt": "x"}) as response:
            assert (b"x-engine", "d0 is über".encode()) in {(key.lower(), value) for key, value in response.raw_headers}


@asynchronous
async def test_comments_reach_the_client_before_the_first_token() -> None:
    async with world() as here:
        here.d.pieces = [b": keep-alive\n\n", b"data: 1\n\n"]
        here.d.step = asyncio.Semaphore(1)
        async with here.stream() as response:
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            here.d.step.release()
            assert await response.content.read() == b"data: 1\n\n"


@asynchronous
async def test_another_attempt_can_follow_comments() -> None:
    async with world(decodes=2, decode_policy="round_robin") as here:
        failing, other = here.decode
        failing.pieces = [b": keep-alive\n\n", b'data: {"error": {"message": "no", "code": 500}}\n\n']
        failing.step = asyncio.Semaphore(1)
        other.pieces = [b"data: 1\n\n"]
        while not failing.seen:
            async with here.stream() as response:
                first = await response.content.readuntil(b"\n\n")
                failing.step.release()
                rest = await response.content.read()
        assert first + rest == b": keep-alive\n\ndata: 1\n\n"
        assert other.seen


async def _opened(request: Awaitable[aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
    return await request


@asynchronous
async def test_a_refusal_after_comments_is_an_event() -> None:
    async with world() as here:
        here.d.pieces = [b": keep-alive\n\n", b"data: 1\n\n"]
        here.d.step = asyncio.Semaphore(1)
        here.p.faults.append("400")
        here.p.hold = asyncio.Event()
        body = {"model": "stub", "prompt": "x", "stream": True}
        request = asyncio.create_task(_opened(here.session.post(f"{here.url}/v1/completions", json=body)))
        await until(lambda: here.d.seen, "D has it")
        here.network.pushed(here.d.seen[0].request_id).set()
        response = await request
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        here.p.hold.set()
        event, done, _ = (await response.content.read()).split(b"\n\n")
        assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "p0 says 400"
        assert done == b"data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_a_refusal_by_d_is_passed_on(stream: bool) -> None:
    async with world(decodes=2) as here:
        for decode in here.decode:
            decode.faults.append("400")
        here.p.hold = asyncio.Event()
        reply = await here.post(stream=stream)
        assert reply.status == 400
        assert json.loads(reply.body)["error"]["message"] in ("d0 says 400", "d1 says 400")
        assert len(here.decode[0].seen + here.decode[1].seen) == 1
        await until(lambda: here.p.cancelled == 1, "P's leg is cancelled")
        assert await here.metric('layerpush_proxy_requests_total{endpoint="completions",outcome="client_error"}') == 1


@asynchronous
async def test_a_refusal_by_p_is_passed_on_while_d_waits() -> None:
    async with world() as here:
        here.p.faults.append("400")
        reply = await here.post(stream=True)
        assert reply.status == 400
        assert json.loads(reply.body)["error"]["message"] == "p0 says 400"
        await until(lambda: here.d.cancelled == 1, "D's leg is cancelled")


@asynchronous
async def test_a_refusal_in_the_stream_is_passed_on() -> None:
    async with world(decodes=2) as here:
        for decode in here.decode:
            decode.faults.append("error_event_400")
        reply = await here.post(stream=True)
        assert reply.status == 200
        (sent,) = [*here.decode[0].sent.values(), *here.decode[1].sent.values()]
        assert reply.body == sent


@asynchronous
async def test_a_broken_stream_ends_with_an_error_after_whole_events() -> None:
    async with world() as here:
        here.d.faults.append("cut")
        reply = await here.post(stream=True)
        *events, error, done, nothing = reply.body.split(b"\n\n")
        assert b"\n\n".join([*events, b""]) == here.d.sent[here.d.seen[0].request_id]
        assert len(events) == 2
        assert (done, nothing) == (b"data: [DONE]", b"")
        told = json.loads(error.removeprefix(b"data: "))["error"]
        assert told["code"] == 502
        assert told["message"] == "the decode engine broke the connection; the log of the proxy says more"
        assert await here.metric('layerpush_proxy_leg_failures_total{engine="' + here.d.url) == 1


@asynchronous
async def test_a_silent_d_times_out() -> None:
    async with world(stream_idle_timeout_s=0.1) as here:
        here.d.step = asyncio.Semaphore(1)
        reply = await here.post(stream=True)
        assert b'"code": 504' in reply.body
        assert b"--stream-idle-timeout-secs" in reply.body
        await until(lambda: here.d.cancelled == 1, "D's request is aborted")


@asynchronous
async def test_a_slow_reader_slows_d_down() -> None:
    async with world() as here:
        here.d.pieces = [b"data: " + b"x" * 65536 + b"\n\n"] * 1000
        written = here.d.sent
        async with here.stream() as response:
            await response.content.readany()
            size = -1
            while size != (size := sum(map(len, written.values()))):
                await asyncio.sleep(0.2)
            assert size < 40 << 20
            assert len(await response.content.read()) > 20 << 20
