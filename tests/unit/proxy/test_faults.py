"""Clients that leave, engines that fail: cancels, retries, and the client's answer."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from tests.unit.proxy.stub import Fault
from tests.unit.proxy.world import asynchronous, until, world

BODY = {"model": "stub", "prompt": "x", "max_tokens": 4}


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_a_disconnect_before_the_first_token_cancels_both_legs(stream: bool) -> None:
    async with world() as here:
        here.p.hold = asyncio.Event()
        request = asyncio.create_task(here.post(stream=stream))
        await until(lambda: here.p.active and here.d.active, "both engines work")
        request.cancel()
        await until(lambda: here.p.cancelled and here.d.cancelled, "both legs are cancelled")
        await until(lambda: not here.proxy.requests, "its place is free")
        assert all(not instance.requests for instance in here.engines)


@asynchronous
async def test_a_disconnect_during_a_stream_cancels_a_running_p() -> None:
    async with world() as here:
        here.p.hold = asyncio.Event()
        here.d.step = asyncio.Semaphore(1)
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(f"{here.url}/v1/completions", json=BODY | {"stream": True}))
            await until(lambda: here.d.seen, "D has it")
            here.network.pushed(here.d.seen[0].request_id).set()
            response = await request
            await response.content.readuntil(b"\n\n")
            assert here.p.active
            response.close()
        await until(lambda: here.d.cancelled and here.p.cancelled, "both legs are cancelled")


@pytest.mark.parametrize("fault", ["500", "drop"])
@asynchronous
async def test_a_failure_of_p_after_ds_first_token_is_ignored(fault: Fault) -> None:
    async with world() as here:
        here.p.faults.append(fault)
        here.p.hold = asyncio.Event()
        here.d.step = asyncio.Semaphore(1)
        request = asyncio.create_task(here.post(stream=True))
        await until(lambda: here.d.seen, "D has it")
        request_id = here.d.seen[0].request_id
        here.network.pushed(request_id).set()
        await until(lambda: here.d.sent.get(request_id), "D has said something")
        here.p.hold.set()
        await until(lambda: not here.p.active, "P has failed")
        for _ in range(10):
            here.d.step.release()
        reply = await request
        assert (reply.status, reply.body) == (200, here.d.sent[request_id])
        assert len(here.d.seen) == 1


@pytest.mark.parametrize(("role", "stream"), [("prefill", False), ("prefill", True), ("decode", True)])
@asynchronous
async def test_a_hanging_engine_times_out(role: str, stream: bool) -> None:
    """While P hangs, D waits for it."""
    async with world(engine_timeout_secs=0.2, retries=0) as here:
        (here.p if role == "prefill" else here.d).faults.append("hang")
        reply = await here.post(stream=stream)
        assert reply.status == 504
        assert role == "prefill" or b"--engine-timeout-secs" in reply.body
        cancelled = (role == "prefill", True)
        await until(lambda: (here.p.cancelled, here.d.cancelled) == cancelled, "both legs are over")
        await until(lambda: not here.proxy.requests, "its place is free")


FAULTS: list[Fault] = ["drop", "500", "429"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@asynchronous
async def test_a_failed_p_is_replaced(fault: Fault, stream: bool) -> None:
    async with world(prefills=2, decodes=1) as here:
        for prefill in here.prefill:
            prefill.faults.append(fault)
        here.prefill[1].faults.clear()
        while not here.prefill[0].seen:
            reply = await here.post(stream=stream)
            assert reply.status == 200
            assert reply.body == here.d.sent[here.d.seen[-1].request_id]
        first, second = here.d.seen[-2:]
        assert first.request_id != second.request_id
        assert second.params["remote_engine_id"] == "p1"
        assert here.d.cancelled == 1
        assert here.proxy.retries == 1


@pytest.mark.parametrize(
    ("fault", "stream"),
    [*((fault, stream) for fault in FAULTS for stream in (False, True)), ("error_event", True), ("empty", True)],
)
@asynchronous
async def test_a_failed_d_is_replaced(fault: Fault, stream: bool) -> None:
    async with world(prefills=1, decodes=2) as here:
        here.decode[0].faults.append(fault)
        while not here.decode[0].seen:
            reply = await here.post(stream=stream)
            assert reply.status == 200
        assert reply.body == here.decode[1].sent[here.decode[1].seen[-1].request_id]
        assert here.proxy.retries == 1


@pytest.mark.parametrize("fault", ["500", "429"])
@asynchronous
async def test_a_d_that_refuses_while_p_computes_is_replaced(fault: Fault) -> None:
    """An overloaded D answers at once; the only P has hardly begun."""
    async with world(prefills=1, decodes=2) as here:
        here.p.hold = asyncio.Event()
        here.decode[0].faults.append(fault)
        here.decode[1].faults.append(fault)
        reply = asyncio.create_task(here.post())
        await until(lambda: sum(len(each.seen) for each in here.decode) == 2, "both D are asked")
        here.p.hold.set()
        assert (await reply).status == int(fault)
        assert len(here.decode[0].seen) == len(here.decode[1].seen) == 1, "no engine is asked twice"

        here.p.hold = asyncio.Event()
        here.decode[0].faults.append(fault)
        before = [len(each.seen) for each in here.decode]
        replies = [asyncio.create_task(here.post()) for _ in range(2)]
        await until(lambda: not here.decode[0].faults, "one has refused")
        here.p.hold.set()
        assert [(await each).status for each in replies] == [200, 200]
        assert sum(len(each.seen) for each in here.decode) - sum(before) == 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
@asynchronous
async def test_a_broken_connection_to_the_only_engine_is_retried(role: str) -> None:
    """For example, an engine closes a kept connection just as the proxy uses it again."""
    async with world() as here:
        (here.p if role == "prefill" else here.d).faults.append("drop")
        assert (await here.post()).status == 200


@asynchronous
async def test_a_d_that_failed_because_of_p_may_get_the_retry() -> None:
    async with world(prefills=2) as here:
        here.prefill[0].hold = asyncio.Event()
        here.engines[1].requests = 5  # P0 is chosen unless it is suspected
        here.d.faults.append("500")
        assert (await here.post()).status == 200
        assert here.d.seen[0].params["remote_engine_id"] == "p0"
        assert here.d.seen[-1].params["remote_engine_id"] == "p1"


@asynchronous
async def test_the_number_of_attempts_is_limited() -> None:
    async with world(prefills=5, retries=2) as here:
        for prefill in here.prefill:
            prefill.faults.extend(["500"] * 5)
        assert (await here.post()).status == 500
        assert sum(len(prefill.seen) for prefill in here.prefill) == 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
@asynchronous
async def test_a_stopped_engine_is_replaced_and_rests(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(prefills=2, decodes=2) as here:
        gone = (here.prefill if role == "prefill" else here.decode)[0]
        await gone.stop()
        for _ in range(6):
            assert (await here.post()).status == 200
        assert here.proxy.retries == 1
        assert [each.url for each in here.engines if each.rests_until] == [gone.url]
        await gone.start()
        for each in here.engines:
            each.rests_until = min(each.rests_until, asyncio.get_running_loop().time())
        while not gone.seen:
            assert (await here.post()).status == 200


@asynchronous
async def test_no_request_is_refused_while_the_only_engines_rest() -> None:
    async with world() as here:
        for each in here.engines:
            each.gone(asyncio.get_running_loop().time())
        assert [reply.status for reply in await asyncio.gather(*(here.post() for _ in range(5)))] == [200] * 5


@pytest.mark.parametrize("role", ["prefill", "decode"])
@asynchronous
async def test_the_error_for_engines_that_are_down(role: str) -> None:
    """They may start after the proxy."""
    async with world() as here:
        stub = here.p if role == "prefill" else here.d
        await stub.stop()
        reply = await here.post()
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        message = f"the {role} engine cannot be connected to; the log of the proxy says more"
        assert json.loads(reply.body)["error"]["message"] == message
        await stub.start()
        assert (await here.post()).status == 200


@asynchronous
async def test_an_engine_that_takes_no_connection_in_time_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as here:

        async def late(*_: Any, **__: Any) -> Any:
            raise aiohttp.ConnectionTimeoutError("connection timeout to host http://d0")

        monkeypatch.setattr(here.proxy.engines._session.connector, "connect", late)
        assert (await here.post()).status == 503
        assert here.proxy.prefill.engines[0].rests_until > asyncio.get_running_loop().time()


@asynchronous
async def test_a_whole_answer_may_take_longer_than_the_first_token_timeout() -> None:
    async with world(engine_timeout_secs=0.2) as here:
        here.d.hold = asyncio.Event()
        request = asyncio.create_task(here.post())
        began = time.monotonic()
        await until(lambda: time.monotonic() > began + 0.5, "the limit for streams is long past")
        here.d.hold.set()
        assert (await request).status == 200


@asynchronous
async def test_a_request_beyond_its_timeout_ends() -> None:
    async with world(request_timeout_secs=0.3) as here:
        here.d.step = asyncio.Semaphore(0)
        reply = await here.post(stream=True)
        assert reply.status == 504
        assert b"--request-timeout-secs" in reply.body
        here.d.step.release()
        with pytest.raises(aiohttp.ClientPayloadError):
            await here.post(stream=True)
        await until(lambda: here.d.cancelled == 2, "D's requests are aborted")


@asynchronous
async def test_too_many_requests_are_refused() -> None:
    async with world(max_concurrent_requests=2) as here:
        here.d.hold = asyncio.Event()
        requests = [asyncio.create_task(here.post()) for _ in range(2)]
        await until(lambda: len(here.d.seen) == 2, "two are under way")
        reply = await here.post()
        assert reply.status == 429
        assert reply.headers["Retry-After"] == "1"
        assert b"2 requests are under way (--max-concurrent-requests)" in reply.body
        here.d.hold.set()
        assert [(await request).status for request in requests] == [200, 200]
        assert (await here.post()).status == 200


@asynchronous
async def test_the_proxy_follows_no_redirect() -> None:
    async with world() as here:
        here.d.faults.append("redirect")
        async with here.session.post(f"{here.url}/v1/completions", json=BODY, allow_redirects=False) as response:
            assert response.status == 502
            assert "Location" not in response.headers
            assert b"the decode engine answered 307 to /v1/completions" in await response.read()


@asynchronous
async def test_a_disconnect_during_the_body_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    async with world() as here:
        _, writer = await asyncio.open_connection("127.0.0.1", int(here.url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await here.post()).status == 200
    assert "Unhandled exception" not in capfd.readouterr().err


@asynchronous
async def test_other_paths_and_methods_are_refused() -> None:
    async with world() as here:
        reply = await here.get("/v1/embeddings")
        assert reply.status == 404
        assert "/v1/completions" in json.loads(reply.body)["error"]["message"]
        reply = await here.get("/v1/completions")
        assert reply.status == 405
