"""The bounds of a request's head, in bytes and in time, and the heads that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from layerpush.apps.http_server import MAX_HEADERS, MAX_LINE_BYTES
from tests.unit.proxy.test_hostile import BODY, head, raw
from tests.unit.proxy.world import World, asynchronous, until, world

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
JSON = json.dumps(BODY).encode()
IMPATIENT = {"keepalive_timeout": 0.3}
CHUNKED = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the next answer on a connection."""
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    (length,) = [int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")]
    return int(lines[0].split(b" ")[1]), await reader.readexactly(length)


async def ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""


async def pour(writer: asyncio.StreamWriter) -> int:
    """Send until the other side closes. Returns the number of bytes."""
    sent = 0
    try:
        while True:
            writer.write(b"a" * 4096)
            await writer.drain()
            sent += 4096
            assert sent < 1 << 30
    except ConnectionError:
        return sent


ENDLESS = {
    "request line": b"GET /",
    "header name": b"GET /health HTTP/1.1\r\nX",
    "header value": b"GET /health HTTP/1.1\r\nHost: x\r\nX: ",
    "second head": HEALTH + b"GET /",
    "trailer": CHUNKED + b"%x\r\n%b\r\n0\r\nX: " % (len(JSON), JSON),
    "chunk extension": CHUNKED + b"1;",
}


@pytest.mark.parametrize("beginning", ENDLESS.values(), ids=ENDLESS)
@asynchronous
async def test_a_line_that_does_not_end_closes_its_connection(beginning: bytes) -> None:
    async with world(upload_s=0.5) as here:
        _, writer = await raw(here, beginning)
        await pour(writer)
        assert (await here.post()).status == 200


@asynchronous
async def test_the_answer_to_a_head_that_is_too_long() -> None:
    async with world() as here:
        lines = b"X: y\r\n" * (MAX_HEADERS - 1)
        reader, writer = await raw(here, HEALTH[:-2] + lines + b"\r\n")
        assert (await answer(reader))[0] == 200
        for more in (lines * 2, b"X: " + b"a" * 2 * MAX_LINE_BYTES + b"\r\n"):
            reader, writer = await raw(here, HEALTH[:-2] + more + b"\r\n")
            assert (await answer(reader))[0] == 400
            await ended(reader)
            writer.close()


@asynchronous
async def test_a_body_may_be_larger_than_a_head() -> None:
    async with world() as here:
        body = json.dumps(BODY | {"prompt": "x" * 1000 * 1000}).encode()
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:100_000], body[100_000:]))
        for request in (head(len(body)) + body, CHUNKED + chunks + b"0\r\n\r\n"):
            reader, writer = await raw(here, request)
            assert (await answer(reader))[0] == 200
            writer.close()


@pytest.mark.parametrize("beginning", [b"G", HEALTH[:-2], HEALTH + b"\r\nG"], ids=["byte", "open head", "second head"])
@asynchronous
async def test_an_unfinished_head_times_out(beginning: bytes) -> None:
    async with world(runner=IMPATIENT) as here:
        reader, writer = await raw(here, beginning)
        if beginning.startswith(HEALTH):
            assert (await answer(reader))[0] == 200
        await ended(reader)
        writer.close()


@asynchronous
async def test_a_connection_without_a_byte_is_closed() -> None:
    async with world(runner=IMPATIENT) as here:
        reader, writer = await raw(here)
        await ended(reader)
        writer.close()


async def asked(here: World, *more: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request that D answers when it may, and bytes behind it on the same connection."""
    here.d.hold = asyncio.Event()
    connected = await raw(here, head(len(JSON)) + JSON)
    await until(lambda: here.d.seen, "D has it")
    connected[1].write(b"".join(more))
    return connected


@asynchronous
async def test_the_deadline_of_a_head_waits_for_the_answer_before_it() -> None:
    async with world(runner=IMPATIENT) as here:
        reader, writer = await asked(here, b"GET /health ")
        now = asyncio.get_running_loop().time
        began = now()
        await until(lambda: now() > began + 0.5, "the deadline has passed twice")
        assert here.d.hold is not None
        here.d.hold.set()
        assert (await answer(reader))[0] == 200
        writer.write(HEALTH.removeprefix(b"GET /health "))
        assert (await answer(reader))[0] == 200
        writer.close()


@asynchronous
async def test_a_kept_connection_serves_many_requests() -> None:
    async with world() as here:
        reader, writer = await raw(here)
        for _ in range(20):
            writer.write(HEALTH[:-2] + b"X: " + b"a" * (MAX_LINE_BYTES - 8) + b"\r\n\r\n")
            assert (await answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize(
    ("request_head", "message"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", b"Missing 'Host'"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", b"Duplicate 'Host'"),
        (b"GET /health HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", b"Duplicate 'Host'"),
        (CHUNKED.replace(b": chunked", b": chunked\r\nTransfer-Encoding: chunked"), b""),
    ],
)
@asynchronous
async def test_other_heads_are_refused(request_head: bytes, message: bytes) -> None:
    async with world() as here:
        reader, writer = await raw(here, request_head, b"0\r\n\r\n" if b"chunked" in request_head else b"")
        status, body = await answer(reader)
        assert status == 400
        assert message in body
        await ended(reader)
        writer.close()


@asynchronous
async def test_http_1_0_needs_no_host() -> None:
    async with world() as here:
        reader, writer = await raw(here, b"GET /health HTTP/1.0\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.close()
