"""Malicious or clumsy clients: the resources that they can hold, and for how long."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import Any

import aiohttp
import pytest

from tests.unit.proxy.world import World, asynchronous, until, world

BODY = {"model": "stub", "prompt": "x", "max_tokens": 4}


async def raw(here: World, *parts: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(here.url.rsplit(":", 1)[1]))
    for part in parts:
        writer.write(part)
    await writer.drain()
    return reader, writer


def head(length: int, *lines: str) -> bytes:
    text = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {length}", *lines]
    return "\r\n".join([*text, "", ""]).encode("latin-1")


@asynchronous
async def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    async with world(max_total_payload_size=1000) as here:
        reader, writer = await raw(here, head(10**12))
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()


@asynchronous
async def test_an_endless_body_times_out() -> None:
    async with world(upload_s=0.2) as here:
        reader, writer = await raw(here, head(100), b"{")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body took more than 0.2 s" in answer
        writer.close()
        await until(lambda: (here.proxy.requests, here.proxy.body_bytes) == (0, 0), "nothing is counted")


@asynchronous
async def test_a_body_that_arrives_takes_a_place() -> None:
    async with world(max_concurrent_requests=2) as here:
        uploads = [await raw(here, head(100), b"{") for _ in range(2)]
        await until(lambda: here.proxy.body_bytes == 2, "two bodies arrive")
        reader, writer = await raw(here, head(100))
        assert (await reader.readline()).startswith(b"HTTP/1.1 429 "), "it is refused unread"
        writer.close()
        uploads[0][1].close()
        await until(lambda: here.proxy.requests == 1, "a client has left")
        assert (await here.post()).status == 200
        uploads[1][1].close()
        await until(lambda: not here.proxy.body_bytes, "no body is counted")


@pytest.mark.parametrize("framing", ["Content-Length: 900", "Transfer-Encoding: chunked"])
@asynchronous
async def test_bodies_that_are_too_large_together_are_refused(framing: str) -> None:
    async with world(max_total_payload_size=1000) as here:
        _, first = await raw(here, head(900), b"a" * 500)
        await until(lambda: here.proxy.body_bytes == 500, "a part of a body is here")
        start = head(0).replace(b"Content-Length: 0", framing.encode())
        reader, writer = await raw(here, start, (b"384\r\n" + b"a" * 900) * framing.endswith("chunked"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")
        assert b"--max-total-payload-size" in await reader.readuntil(b"}")
        for each in (first, writer):
            each.close()
        await until(lambda: not here.proxy.body_bytes, "no body is counted")
        assert (await here.post()).status == 200


@pytest.mark.parametrize(
    "lines",
    [
        ["Transfer-Encoding: chunked"],
        ["Content-Length: 5"],
        ["Authorization: Bearer a\rX-Request-Id: mine"],
        ["Authorization : Bearer a"],
    ],
    ids=["two framings", "two lengths", "carriage return", "space before the colon"],
)
@asynchronous
async def test_ambiguous_requests_are_refused(lines: list[str]) -> None:
    async with world() as here:
        body = json.dumps(BODY).encode()
        reader, writer = await raw(here, head(len(body), *lines), body)
        assert (await reader.readline()).split(b" ")[1] == b"400"
        writer.close()
        assert not here.d.seen


@pytest.mark.parametrize("value", [b"Bearer \xff\xfe", b"Bearer a\tb", b"x" * 20_000, b""])
@asynchronous
async def test_odd_headers_reach_the_engines_unchanged_or_not_at_all(
    value: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async with world() as here:
        body = json.dumps(BODY).encode()
        lines = f"Authorization: {value.decode('latin-1')}", "Connection: close"
        reader, writer = await raw(here, head(len(body), *lines), body)
        status = int((await reader.read()).split(b" ", 2)[1])
        writer.close()
        assert status < 500
        received = {seen.headers.get("Authorization") for seen in here.p.seen + here.d.seen}
        assert received <= {None, value.decode("latin-1")}
        assert (await here.post()).status == 200
    assert "Unhandled exception" not in capfd.readouterr().err


@asynchronous
async def test_a_client_that_reads_nothing_times_out() -> None:
    async with world(request_timeout_secs=1.0) as here:
        here.d.pieces = [b"data: " + b"x" * 65536 + b"\n\n"] * 1000
        body = json.dumps(BODY | {"stream": True}).encode()
        _, writer = await raw(here, head(len(body)), body)
        await until(lambda: here.d.active, "D writes")
        await until(lambda: not here.d.active and not here.proxy.requests, "its request has ended")
        writer.transport.abort()
        here.d.pieces = None
        assert (await here.post()).status == 200


@asynchronous
async def test_disconnects_at_any_moment_leave_nothing_behind() -> None:
    async with world(prefills=2, decodes=2) as here:

        async def leave_after(delay_s: float) -> None:
            async with aiohttp.ClientSession() as session:
                with_limit = aiohttp.ClientTimeout(total=delay_s)
                try:
                    async with session.post(
                        f"{here.url}/v1/completions", json=BODY | {"stream": True}, timeout=with_limit
                    ) as response:
                        await response.read()
                except TimeoutError:
                    pass

        def tasks() -> int:
            """All tasks but those of engines that wait on a kept connection."""
            coroutines = [str(task.get_coro()) for task in asyncio.all_tasks()]
            return sum("RequestHandler.start" not in each for each in coroutines)

        before = tasks()
        await asyncio.gather(*(leave_after(0.0005 * index + 1e-6) for index in range(100)))
        await until(lambda: here.proxy.requests == 0, "all places are free")
        await until(lambda: not any(stub.active for stub in here.prefill + here.decode), "no engine works")
        await until(lambda: not any(each.requests for each in here.engines), "no work is counted")
        await until(lambda: not here.p.active, "no leg is left")
        await until(lambda: tasks() <= before, "no task is left")
        assert (await here.post()).status == 200


@asynchronous
async def test_a_proxy_that_runs_out_of_files_refuses_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as here:

        async def no_file(request: Any, *_: Any, **__: Any) -> Any:
            raise aiohttp.ClientConnectorError(request.connection_key, OSError(errno.EMFILE, "Too many open files"))

        monkeypatch.setattr(here.proxy.engines._session.connector, "connect", no_file)
        reply = await here.post()
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        monkeypatch.undo()
        assert (await here.post()).status == 200


@asynchronous
async def test_no_task_outlives_the_proxy(caplog: pytest.LogCaptureFixture) -> None:
    before = asyncio.all_tasks()
    async with world() as here:
        here.p.hold_probes = asyncio.Event()
        request = asyncio.create_task(here.post())
        await until(lambda: here.p.probes, "P is asked for its identity")
        request.cancel()
        await asyncio.wait((request,))
    assert asyncio.all_tasks() == before
    assert "Sequential dispatch" not in caplog.text
