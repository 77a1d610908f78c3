"""The command: its options, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from layerpush.apps.cli import app
from tests.unit.proxy.stub import Network, Stub, running
from tests.unit.proxy.world import asynchronous, free_port, until, world

runner = CliRunner()
GOOD = ["proxy", "--prefill", "http://p:1", "--decode", "http://d:1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["proxy"], "--prefill"),
        (["proxy", "--prefill", "http://p:1"], "--decode"),
        ([*GOOD, "--prefill", "p:1"], "write http://HOST:PORT"),
        ([*GOOD, "--decode", "http://p:1"], "an engine has one role"),
        ([*GOOD, "--decode", "http://d:1/"], "http://d:1 comes twice"),
        ([*GOOD, "--port", "70000"], "--port"),
        ([*GOOD, "--engine-timeout-secs", "0"], "--engine-timeout-secs"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in result.output


def pair() -> tuple[Stub, Stub]:
    network = Network()
    return Stub(network, "prefill", "p0"), Stub(network, "decode", "d0")


class Process:
    """`layerpush proxy` as a process of its own."""

    def __init__(self, url: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.url = url
        self.log = log
        self.process = process

    async def ended(self) -> int:
        async with asyncio.timeout(30):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def proxy_process(
    tmp_path: Path, *stubs: Stub, options: tuple[str, ...] = (), prefix: tuple[str, ...] = ()
) -> AsyncIterator[Process]:
    """``prefix``: a command that starts the proxy in its own process."""
    port = free_port()
    log = tmp_path / "log"
    arguments = ["--port", str(port), *options]
    for stub in stubs:
        arguments += [f"--{stub.role}", stub.url]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *prefix, sys.executable, "-m", "layerpush", "proxy", *arguments, stdout=output, stderr=output
        )
    try:
        yield Process(f"http://127.0.0.1:{port}", log, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def serves(proxy: Process) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{proxy.url}/health") as response:
                    if response.status == 200:
                        return
            assert proxy.process.returncode is None, proxy.log.read_text()
            await asyncio.sleep(0.02)


async def refused(proxy: Process) -> None:
    """Wait until the port takes no connections."""
    async with asyncio.timeout(30):
        with contextlib.suppress(aiohttp.ClientConnectorError):
            while True:
                async with aiohttp.ClientSession() as session, session.get(f"{proxy.url}/health"):
                    pass


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@asynchronous
async def test_after_a_signal_requests_finish_and_new_ones_are_refused(tmp_path: Path, signum: signal.Signals) -> None:
    p, d = pair()
    d.step = asyncio.Semaphore(1)
    async with running(p, d), proxy_process(tmp_path, p, d) as proxy, aiohttp.ClientSession() as session:
        await serves(proxy)
        body = {"model": "stub", "prompt": "x", "stream": True, "max_tokens": 3}
        async with session.post(f"{proxy.url}/v1/completions", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            proxy.process.send_signal(signum)
            await until(lambda: b"draining: 1 requests" in proxy.log.read_bytes(), "it says that it drains")
            await refused(proxy)
            assert proxy.process.returncode is None
            for _ in range(3):
                d.step.release()
            rest = await response.content.read()
            assert first + rest == d.sent[d.seen[0].request_id]
            assert rest.endswith(b"data: [DONE]\n\n")
        assert await proxy.ended() == 0


@asynchronous
async def test_requests_beyond_the_drain_timeout_break_off() -> None:
    async with contextlib.AsyncExitStack() as proxy:
        here = await proxy.enter_async_context(world())
        here.d.step = asyncio.Semaphore(1)
        async with aiohttp.ClientSession() as session:
            body = {"model": "stub", "prompt": "x", "stream": True, "max_tokens": 3}
            async with session.post(f"{here.url}/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                closing = asyncio.create_task(proxy.aclose())
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.content.read()
            await closing
        assert here.d.cancelled


@asynchronous
async def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    p, d = pair()
    async with running(p, d), proxy_process(tmp_path, p, d, options=("--port", str(p.port))) as proxy:
        assert await proxy.ended() == 1
        assert "address already in use" in proxy.log.read_text()


@asynchronous
async def test_the_proxy_may_open_as_many_files_as_its_hard_limit_and_logs_no_bad_head(tmp_path: Path) -> None:
    p, d = pair()
    few = ("bash", "-c", 'ulimit -Sn 256 && exec "$@"', "bash")
    async with running(p, d), proxy_process(tmp_path, p, d, prefix=few) as proxy:
        await serves(proxy)
        limits = Path(f"/proc/{proxy.process.pid}/limits").read_text().splitlines()
        (soft, hard) = next(line.split()[3:5] for line in limits if line.startswith("Max open files"))
        assert soft == hard != "256"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        assert "Traceback" not in proxy.log.read_text()
