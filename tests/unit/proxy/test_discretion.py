"""Engines' addresses and their own words about failures: clients do not see them, the log has them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from multidict import CIMultiDict
from yarl import URL

from layerpush.apps.proxy import legs
from layerpush.apps.proxy.body import COMPLETIONS
from layerpush.apps.proxy.errors import MESSAGE_CHARS
from tests.unit.proxy.stub import Fault
from tests.unit.proxy.world import Reply, World, asynchronous, until, world

SECRET = "Traceback: /home/secret, token hf_abc"


def answered(status: str, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def error_of(reply: Reply) -> dict[str, Any]:
    """The error that a client got, which names no engine's address."""
    body = reply.body.partition(b"data: ")[2].partition(b"\n")[0] if reply.status == 200 else reply.body
    error: dict[str, Any] = json.loads(body)["error"]
    assert b"127.0.0.1" not in reply.body
    return error


@pytest.mark.parametrize(("stream", "fault"), [(False, "500"), (True, "500"), (True, "error_event"), (False, "429")])
@asynchronous
async def test_ds_own_words_stay_inside(stream: bool, fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    async with world() as here:
        here.d.engine_id = SECRET
        here.d.faults.append(fault)
        reply = await here.post(stream=stream)
        assert reply.status == (429 if fault == "429" else 500)
        assert error_of(reply)["code"] == reply.status
        assert error_of(reply)["message"].startswith("the decode engine ")
        assert SECRET.encode() not in reply.body
        assert reply.headers.get("Retry-After") == ("1" if fault == "429" else None)
    assert any(SECRET in message and here.d.url in message for message in caplog.messages)


@asynchronous
async def test_ps_own_words_stay_inside(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as here:
        here.p.engine_id = SECRET
        here.p.faults.append("500")
        reply = await here.post(stream=True)
        assert reply.status == 500
        message = "the prefill engine answered 500 to /v1/completions; the log of the proxy says more"
        assert error_of(reply) == {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    assert any(f"{here.p.url} answered 500 to /v1/completions: " in each and SECRET in each for each in caplog.messages)


@pytest.mark.parametrize("fault", ["drop", "cut"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@asynchronous
async def test_errors_of_a_connection_name_no_address(role: str, fault: Fault) -> None:
    async with world(retries=0) as here:
        (here.p if role == "prefill" else here.d).faults.append(fault)
        reply = await here.post()
        assert reply.status == 502
        assert error_of(reply)["message"] == f"the {role} engine broke the connection; the log of the proxy says more"


@pytest.mark.parametrize("status", ["999 Odd", "600 Odd", "204 No Content", "299 Odd", "304 Not Modified", "599 Odd"])
@asynchronous
async def test_an_odd_status_is_a_failure(status: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with world(retries=0) as here:
        here.d.raw = answered(status, b"")
        reply = await here.post()
        assert reply.status == 502
        assert f"the decode engine answered {status[:3]} to /v1/completions" in error_of(reply)["message"]
    assert "Unhandled exception" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x1b[2J garbage\n" * 1000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + b"y" * 20_000,
    ],
    ids=["no HTTP", "many headers", "long header", "bad chunk"],
)
@asynchronous
async def test_garbled_bytes_reach_neither_the_client_nor_the_log(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with world(retries=0) as here:
        here.d.raw = raw
        reply = await here.post()
        assert reply.status == 502
        assert error_of(reply)["message"] == "the decode engine broke the connection; the log of the proxy says more"
    assert caplog.messages
    for message in caplog.messages:
        assert len(message) < 2 * MESSAGE_CHARS
        assert message.isprintable()


@asynchronous
async def test_headers_about_the_connection_to_d_stay_inside() -> None:
    async with world() as here:
        here.d.raw = answered(
            "200 OK",
            b"{}",
            "Connection: close, X-Hop",
            "connection: X-Other-Hop",
            "X-Hop: 1",
            "x-other-hop: 1",
            "Keep-Alive: timeout=3",
            "Proxy-Authenticate: Basic",
            "Proxy-Connection: close",
            "Upgrade: h2c",
            "Trailer: X",
            "TE: trailers",
            "Alt-Svc: h3",
            "Set-Cookie: a=b",
            "Strict-Transport-Security: max-age=1",
            "Via: 1.1 inner",
            "Location: http://10.0.0.7",
            "Server: engine",
            "X-Request-Id: to-end",
        )
        reply = await here.post()
        assert reply.status == 200
        ours = {"date", "server", "content-type", "content-length"}
        assert {key.lower() for key in reply.headers} == ours | {"x-request-id"}
        assert "engine" not in reply.headers["Server"]
        cookies, engine = here.proxy.engines._session.cookie_jar, URL("http://engine:8000")
        cookies.update_cookies({"who": "a client"}, engine)
        assert not cookies.filter_cookies(engine), "the cookie of an answer is not sent back"


@asynchronous
async def test_several_lines_of_a_header_reach_the_engines_as_one() -> None:
    async with world() as here:
        lines = CIMultiDict([("tracestate", "a=1"), ("tracestate", "b=2")])
        async with here.session.post(f"{here.url}{COMPLETIONS}", json={"prompt": "x"}, headers=lines) as response:
            assert response.status == 200
        assert [stub.seen[-1].headers["tracestate"] for stub in (here.p, here.d)] == ["a=1,b=2"] * 2


@asynchronous
async def test_a_header_that_is_no_utf_8_stays_inside() -> None:
    async with world() as here:
        here.d.raw = answered("200 OK", b"{}", "X-Request-Id: \xff")
        reply = await here.post()
        assert (reply.status, reply.body) == (200, b"{}")
        assert "X-Request-Id" not in reply.headers


@asynchronous
async def test_a_large_answer_is_passed_on_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "HELD_BYTES", 1000)
    async with world() as here:
        for size, length in ((1000, "1000"), (1001, None), (3_000_000, None)):
            here.d.raw = answered("200 OK", b"a" * size)
            reply = await here.post()
            assert (reply.status, reply.body) == (200, b"a" * size)
            assert reply.headers.get("Content-Length") == length


@asynchronous
async def test_an_answer_without_end_does_not_fill_the_memory() -> None:
    async with world() as here:
        here.d.raw = answered("200 OK").replace(b"Length: 2", b"Length: 100000000000") + bytes(1 << 24)
        async with here.session.post(f"{here.url}/v1/completions", json={"model": "m", "prompt": "x"}) as response:
            assert response.status == 200
            assert await response.content.readexactly(1 << 20) == b"{}" + bytes((1 << 20) - 2)


@asynchronous
async def test_a_large_answer_that_breaks_off_has_no_end() -> None:
    async with world() as here:
        here.d.raw = answered("200 OK", b"a" * (3 << 20)).replace(b"Length: ", b"Length: 1")
        with pytest.raises(asyncio.IncompleteReadError):
            await whole(here)


async def whole(here: World) -> bytes:
    """The chunks of an answer, up to the last one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(here.url.rsplit(":", 1)[1]))
    body = b'{"model": "m", "prompt": "x"}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert b"chunked" in await reader.readuntil(b"\r\n\r\n")
    parts = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts += (await reader.readexactly(size + 2))[:-2]
    return parts


@pytest.mark.parametrize("role", ["prefill", "decode"])
@asynchronous
async def test_a_large_error_or_answer_of_p_is_a_failure(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "MAX_ANSWER_BYTES", 1000)
    async with world(retries=0) as here:
        stub = here.p if role == "prefill" else here.d
        stub.raw = answered("200 OK" if role == "prefill" else "400 Bad", b"a" * 1001)
        reply = await here.post()
        assert reply.status == 502
        assert error_of(reply)["message"] == f"the {role} engine sent an answer of more than 1000 bytes"


@asynchronous
async def test_a_first_event_without_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "MAX_ANSWER_BYTES", 1000)
    async with world(retries=0) as here:
        here.d.pieces = [b"data: " + b"x" * 1000, b"x" * 1000, b"x" * 1000]
        reply = await here.post(stream=True)
        assert reply.status == 502
        assert b"the decode engine sent an event of more than 1000 bytes" in reply.body
        await until(lambda: not here.d.active, "D's request is aborted")
