"""Floods of clients: what they make the process hold and log, and who is served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from layerpush.apps import http_server
from layerpush.apps.http_server import MAX_HEADERS, MAX_LINE_BYTES
from layerpush.apps.proxy import proxy as proxy_module
from tests.unit.proxy.test_connection import CHUNKED, HEALTH, answer, ended
from tests.unit.proxy.test_hostile import BODY, head, raw
from tests.unit.proxy.test_server import Process, pair, proxy_process, running, serves
from tests.unit.proxy.world import asynchronous, until, world

PLACES = 64
MB = 1 << 20
LINE = b"X-%03d: %b\r\n" % (0, b"a" * (MAX_LINE_BYTES - 8))
LARGEST = b"GET /%b HTTP/1.1\r\nHost: x\r\n" % (b"u" * (MAX_LINE_BYTES - 30)) + LINE * (MAX_HEADERS - 1)
"""An unfinished head, as large as one may be."""
REFUSED = b"GET / HTTP/1.1\r\nHost: x\r\n" + (b"X: " + b"a" * 8100 + b"\r\n") * 124
REQUEST = head(len(json.dumps(BODY))) + json.dumps(BODY).encode()


def memory_of(proxy: Process) -> int:
    """Resident bytes."""
    status = Path(f"/proc/{proxy.process.pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) << 10


async def health(proxy: Process) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{proxy.url}/health") as answer:
        return answer.status


@contextlib.asynccontextmanager
async def clients(proxy: Process, number: int, sent: bytes = b"") -> AsyncIterator[list[socket.socket]]:
    """Connections on which nothing is read. Each has sent as much of ``sent`` as the proxy took."""
    loop, port = asyncio.get_running_loop(), int(proxy.url.rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        connected = []
        for _ in range(number):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            connected.append(client)
        await asyncio.gather(*(_send(client, sent) for client in connected))
        yield connected


async def _send(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5.0):
            await asyncio.get_running_loop().sock_sendall(client, data)


@pytest.mark.parametrize(
    ("number", "sent"),
    [(600, REFUSED), (600, LARGEST), (PLACES, REQUEST + (LARGEST + b"\r\n") * 32)],
    ids=["too large", "largest", "behind a request"],
)
@asynchronous
async def test_heads_hold_little_memory(number: int, sent: bytes, tmp_path: Path) -> None:
    p, d = pair()
    d.hold = asyncio.Event()
    options = ("--max-concurrent-requests", str(PLACES))
    async with running(p, d), proxy_process(tmp_path, p, d, options=options) as proxy:
        await serves(proxy)
        before = memory_of(proxy)
        async with clients(proxy, number, sent):
            assert await health(proxy) == 200
            assert memory_of(proxy) - before < 100 * MB
        d.hold.set()


@asynchronous
async def test_idle_connections_neither_fill_the_log_nor_stop_others(tmp_path: Path) -> None:
    p, d = pair()
    d.step = asyncio.Semaphore(1)
    few = ("bash", "-c", 'ulimit -n 128 && exec "$@"', "bash")
    async with running(p, d), proxy_process(tmp_path, p, d, prefix=few) as proxy, aiohttp.ClientSession() as session:
        await serves(proxy)
        body = {"model": "stub", "prompt": "x", "stream": True, "max_tokens": 3}
        async with session.post(f"{proxy.url}/v1/completions", json=body) as answer:
            first = await answer.content.readuntil(b"\n\n")
            async with clients(proxy, 400) as idle:
                async with asyncio.timeout(20):
                    assert [await health(proxy) for _ in range(5)] == [200] * 5
                left = Path(f"/proc/{proxy.process.pid}/fd")
                await until(lambda: len(list(left.iterdir())) < 64, "most are closed")
                assert len(idle) == 400
            for _ in range(3):
                d.step.release()
            assert first + await answer.content.read() == d.sent[d.seen[0].request_id]
        log = proxy.log.read_text()
        assert "more than 32 connections; closed old ones" in log
        assert "Traceback" not in log
        assert len(log.splitlines()) < 30


@asynchronous
async def test_a_process_without_files_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as here:
        first, idle = await raw(here, HEALTH)
        assert (await answer(first))[0] == 200
        loop = asyncio.get_running_loop()
        accept, tries = loop.sock_accept, []

        async def no_file(listening: socket.socket) -> Any:
            connection, address = await accept(listening)
            tries.append(address)
            if len(tries) > 3:
                return connection, address
            connection.close()
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(loop, "sock_accept", no_file)
        while len(tries) <= 3:
            reader, writer = await raw(here, HEALTH)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                assert (await answer(reader))[0] == 200
            writer.close()
        (line,) = [record.message for record in caplog.records if "cannot accept" in record.message]
        assert line == "layerpush: cannot accept a connection: [Errno 24] Too many open files"
        await ended(first)
        idle.close()


@asynchronous
async def test_a_list_of_models_takes_a_place_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "MODELS_S", 0.2)
    async with world(max_concurrent_requests=1, d0={"hold": asyncio.Event()}) as here:
        lists = [asyncio.create_task(here.get("/v1/models")) for _ in range(8)]
        assert sorted([reply.status for reply in await asyncio.gather(*lists)]) == [429] * 7 + [503]
        assert here.proxy.requests == 0
        here.d.hold = None
        assert (await here.get("/v1/models")).status == 200


REFUSALS = {
    "bad head": HEALTH[:-2] + b"Host: y\r\n\r\n",
    "long head": b"GET /" + b"a" * 10_000 + b"\r\n\r\n",
    "bad path": b"GET /a\x1b[2J HTTP/1.1\r\nHost: x\r\n\r\n",
    "unknown path": b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n",
    "bad body": head(1) + b"{",
    "large body": head(10**12),
    "broken chunk": CHUNKED + b"x\r\n",
}


@pytest.mark.parametrize("request_", REFUSALS.values(), ids=REFUSALS)
@asynchronous
async def test_refused_requests_do_not_fill_the_log(request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with world() as here:
        await here.post()
        caplog.clear()
        logging.getLogger("aiohttp.server").addFilter(http_server._is_no_bad_head)
        for _ in range(10):
            answers = [await raw(here, request_) for _ in range(30)]
            for reader, writer in answers:
                assert int((await reader.readline()).split(b" ")[1]) >= 400
                writer.close()
        assert not caplog.messages


FAILING: dict[str, dict[str, Any]] = {
    "D": {"d0": {"fails": "500"}},
    "P": {"p0": {"fails": "429"}},
    "D, with a retry": {"d0": {"fails": "429"}, "decodes": 2, "retries": 1},
    "D breaks the connection": {"d0": {"fails": "drop"}},
    "the answer breaks off": {"d0": {"fails": "cut"}, "stream": True},
    "P refuses the question for its identity": {"p0": {"probe_status": 400}},
    "P pulls": {"p0": {"params_override": {"transfer_mode": "pull"}}},
    "P has no connector": {"p0": {"has_connector": False}},
}


@pytest.mark.parametrize("fault", FAILING.values(), ids=FAILING)
@asynchronous
async def test_failed_requests_do_not_fill_the_log(fault: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    fault = {"retries": 0, **fault}
    stream = fault.pop("stream", False)
    async with world(**fault) as here:
        now = asyncio.get_running_loop().time
        began = now()

        async def ask() -> None:
            for number in range(30):
                with contextlib.suppress(aiohttp.ClientError):
                    await here.post(prompt=f"{number}", stream=stream, model=f"model {number}")

        await asyncio.gather(*(ask() for _ in range(10)))
        kinds = 4
        assert 1 <= len(caplog.messages) <= kinds * (now() - began + 1)
