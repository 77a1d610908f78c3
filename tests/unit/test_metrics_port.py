"""`layerpush metrics`: a port that has an engine's metrics and nothing else of its API."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner
from yarl import URL

from layerpush.apps import http_server, metrics_port
from layerpush.apps.cli import app
from layerpush.apps.metrics_port import MAX_SCRAPES, Metrics
from tests.unit.proxy.world import asynchronous, free_port, until

TEXT, KIND = "# HELP vllm:layerpush_ranks ranks\n", "text/plain; version=1.0.0; charset=utf-8"


class Engine:
    """An API server that has every path. It answers when ``gate`` is set."""

    metrics: Metrics

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.now = self.most = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
        finally:
            self.now -= 1
        return web.Response(status=self.status, body=TEXT.encode(), headers={"Content-Type": KIND})


@contextlib.asynccontextmanager
async def url_of(metrics: Metrics) -> AsyncIterator[str]:
    """Its base URL, while it serves."""
    port = free_port()
    async with http_server.serving(metrics.app, metrics.connections, "127.0.0.1", port, 1.0):
        yield f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def port_of(engine: Engine) -> AsyncIterator[str]:
    """The base URL of an engine's metrics port."""
    served = web.Application()
    served.router.add_route("*", "/{path:.*}", engine.answer)
    async with TestServer(served) as server:
        engine.metrics = Metrics(f"http://127.0.0.1:{server.port}")
        async with url_of(engine.metrics) as url:
            yield url


@asynchronous
async def test_it_has_the_engines_metrics() -> None:
    engine = Engine()
    async with port_of(engine) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/metrics") as answer:
            assert (answer.status, await answer.text(), answer.headers["Content-Type"]) == (200, TEXT, KIND)
        engine.status = 503
        async with session.get(f"{url}/metrics") as answer:
            assert answer.status == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/metrics", 405),
        ("HEAD", "/metrics", 405),
        ("GET", "/metrics/", 404),
        ("GET", "//metrics", 404),
        ("GET", "/metrics/../v1/models", 404),
        ("GET", "/metrics%2f..%2fv1/models", 404),
        ("POST", "/v1/completions", 404),
        ("POST", "/invocations", 404),
        ("GET", "/health", 404),
    ],
)
@asynchronous
async def test_no_other_request_reaches_the_engine(method: str, path: str, status: int) -> None:
    engine = Engine()
    async with (
        port_of(engine) as url,
        aiohttp.ClientSession() as session,
        session.request(method, URL(url + path, encoded=True)) as answer,
    ):
        assert answer.status == status
    assert engine.requests == []


@asynchronous
async def test_nothing_of_a_request_is_passed_on() -> None:
    engine = Engine()
    async with port_of(engine) as url, aiohttp.ClientSession() as session:
        headers = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
        async with session.get(f"{url}/metrics?name=other", headers=headers, data=b"body") as answer:
            assert answer.status == 200
    (request,) = engine.requests
    assert request.raw_path == "/metrics"
    assert not {"Authorization", "X-Request-Id", "Content-Length"} & request.headers.keys()


@asynchronous
async def test_scrapes_share_an_answer_and_too_many_are_refused() -> None:
    engine = Engine()
    engine.gate.clear()
    async with port_of(engine) as url, aiohttp.ClientSession() as session:
        scrapes = [asyncio.create_task(session.get(f"{url}/metrics")) for _ in range(MAX_SCRAPES + 3)]
        await until(lambda: sum(each.done() for each in scrapes) == 3, "some are refused")
        engine.gate.set()
        answers = await asyncio.gather(*scrapes)
        assert sorted(answer.status for answer in answers) == [200] * MAX_SCRAPES + [429] * 3
        assert len(engine.requests) == 1
        async with session.get(f"{url}/metrics") as answer:
            assert answer.status == 200
    assert len(engine.requests) == 2, "an answer that has come is not used again"


@asynchronous
async def test_a_scrape_does_not_wait_behind_others_that_have_left() -> None:
    engine = Engine()
    engine.gate.clear()
    async with port_of(engine) as url, aiohttp.ClientSession() as session:
        address = "127.0.0.1", int(url.rsplit(":", 1)[1])
        for _ in range(300):
            _, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            await writer.drain()
            writer.close()

        await until(lambda: engine.now and not engine.metrics._scrapes, "nobody waits for the engine")
        scrape = asyncio.create_task(session.get(f"{url}/metrics"))
        await until(lambda: engine.metrics._scrapes, "a scrape waits")
        engine.gate.set()
        assert (await scrape).status == 200


@asynchronous
async def test_silent_connections_do_not_stop_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "MAX_CONNECTIONS", 4)
    engine = Engine()
    engine.gate.clear()
    async with port_of(engine) as url, aiohttp.ClientSession() as session:
        scrape = asyncio.create_task(session.get(f"{url}/metrics"))
        await until(lambda: engine.now, "a scrape is under way")
        silent = [await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1])) for _ in range(50)]
        engine.gate.set()
        assert (await scrape).status == 200
        async with session.get(f"{url}/metrics") as answer:
            assert answer.status == 200
        for _, writer in silent:
            writer.close()


@asynchronous
async def test_an_engine_that_does_not_answer_is_a_bad_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "SCRAPE_S", 0.1)
    engine = Engine()
    engine.gate.clear()
    async with (
        port_of(engine) as hangs,
        url_of(Metrics(f"http://127.0.0.1:{free_port()}")) as nobody,
        aiohttp.ClientSession() as session,
    ):
        for url in (hangs, nobody):
            async with session.get(f"{url}/metrics") as answer:
                assert (answer.status, await answer.text()) == (502, "the engine does not answer\n")
        engine.gate.set()


@asynchronous
async def test_the_command_serves_until_sigterm() -> None:
    port = free_port()
    command = [sys.executable, "-m", "layerpush", "metrics", "--engine", f"http://127.0.0.1:{free_port()}"]
    process = await asyncio.create_subprocess_exec(*command, "--port", str(port))
    try:

        def listens() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        await until(listens, "the port is open")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


def test_a_taken_port_is_an_error_of_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = CliRunner().invoke(app, ["metrics", "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 1
    assert done.stderr.startswith("layerpush metrics: ")
    assert done.stderr.count("\n") == 1


def test_a_bad_engine_is_refused() -> None:
    done = CliRunner().invoke(app, ["metrics", "--engine", "127.0.0.1:8000"], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert "write http://HOST:PORT" in done.output
