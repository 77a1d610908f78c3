"""The client gets D's answer as D wrote it."""

from __future__ import annotations

import asyncio
import json

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
        assert reply.headers["X-Request-Id"] == "d0"
        assert reply.headers["Content-Length"] == str(len(reply.body))


@asynchronous
async def test_headers_equal_ds_headers_byte_for_byte() -> None:
    async with world() as here:
        here.d.greeting = " is über"
        async with here.session.post(f"{here.url}/v1/completions", json={"model": "stub", "prompt": "x"}) as response:
            headers = {key.lower(): value for key, value in response.raw_headers}
            assert headers[b"x-request-id"] == "d0 is über".encode()


@asynchronous
async def test_another_attempt_can_follow_comments() -> None:
    """Engines send them to keep a connection alive."""
    async with world(decodes=2) as here:
        failing, other = here.decode
        failing.pieces = [b": keep-alive\n\n", b'data: {"error": {"message": "no", "code": 500}}\n\n']
        other.pieces = [b": keep-alive\n\n", b"data: 1\n\n"]
        while not failing.seen:
            reply = await here.post(stream=True)
        assert reply.body == b": keep-alive\n\ndata: 1\n\n"
        assert other.seen


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
async def test_an_answer_that_breaks_in_an_event_has_no_end() -> None:
    async with world() as here:
        here.d.faults.append("cut")
        async with here.stream() as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()


@asynchronous
async def test_an_answer_that_breaks_between_events_has_no_end() -> None:
    async with world() as here:
        events = b"data: 1\n\n"
        here.d.raw = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"%x\r\n%b\r\n" % (len(events), events)
        )
        async with here.stream() as response:
            assert await response.content.readexactly(len(events)) == events
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()


@asynchronous
async def test_a_silent_d_times_out(caplog: pytest.LogCaptureFixture) -> None:
    async with world(engine_timeout_secs=1.0) as here:
        here.d.step = asyncio.Semaphore(1)
        with pytest.raises(aiohttp.ClientPayloadError):
            await here.post(stream=True)
        await until(lambda: here.d.cancelled == 1, "D's request is aborted")
    assert any("was silent for longer than --engine-timeout-secs" in message for message in caplog.messages)


@asynchronous
async def test_a_slow_reader_slows_d_down() -> None:
    async with world() as here:
        here.d.pieces = [b"data: " + b"x" * 65536 + b"\n\n"] * 1000
        written = here.d.sent
        async with here.stream() as response:
            await response.content.readany()
            size, turns = 0, 0
            while turns < 1000:  # all ends of all sockets are in this event loop: then none of them can go on
                await asyncio.sleep(0)
                size, before = sum(map(len, written.values())), size
                turns = turns + 1 if size == before else 0
            assert size < 40 << 20
            assert len(await response.content.read()) > 20 << 20
