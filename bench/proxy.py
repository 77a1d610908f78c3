"""What `layerpush proxy` adds to a request: the same requests to a stub engine, straight and through the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from layerpush.demo.ports import PortAllocator
from layerpush.demo.provenance import provenance

STUB = "bench.stubengine"
ANSWER_TOKENS = 32
START_TIMEOUT_S = 60.0
SEED = 0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Times:
    """Seconds from sending a request to its first byte, and to its last."""

    first: float
    whole: float


@dataclass(frozen=True)
class Cell:
    """All requests with prompts of one length, straight to D and through the proxy, in turn."""

    prompt_tokens: int
    streams: int
    direct: Sequence[Times]
    proxied: Sequence[Times]

    def added_ms(self, part: str, quantile: float) -> float:
        """By how much the proxy's quantile is later, in milliseconds."""
        return 1e3 * (
            _quantile([getattr(each, part) for each in self.proxied], quantile)
            - _quantile([getattr(each, part) for each in self.direct], quantile)
        )

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "streams": self.streams,
            **{
                f"{name}_{part}_ms": [round(1e3 * getattr(each, part), 3) for each in times]
                for name, times in (("direct", self.direct), ("proxied", self.proxied))
                for part in ("first", "whole")
            },
        }


@app.command()
def main(
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, with commas.")] = "16,1024,32768",
    streams: Annotated[str, typer.Option(help="How many streams at a time, with commas.")] = "1,64",
    requests: Annotated[int, typer.Option(min=2, help="Requests of each kind.")] = 200,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all times as JSON.")] = None,
) -> None:
    """Measure the overhead of `layerpush proxy` per request, with engines that answer at once.

    Both the stub engines and the proxy run on this machine: with few cores their times add up more than they would.
    """
    sizes, widths = ([int(part) for part in text.split(",")] for text in (lengths, streams))
    cells = asyncio.run(_measure(sizes, widths, requests))
    table = Table(
        "tokens", "streams", "first byte: median", "99 %", "whole: median", "99 %", title="added by the proxy"
    )
    for cell in cells:
        figures = [f"{cell.added_ms(part, q):.2f} ms" for part in ("first", "whole") for q in (0.5, 0.99)]
        table.add_row(str(cell.prompt_tokens), str(cell.streams), *figures)
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(provenance(SEED) | {"cells": [cell.as_json() for cell in cells]}, indent=1) + "\n")


async def _measure(lengths: Sequence[int], widths: Sequence[int], requests: int) -> list[Cell]:
    ports = PortAllocator()
    p, d, proxy = (ports.take() for _ in range(3))
    urls = [f"http://127.0.0.1:{port}" for port in (p, d, proxy)]
    commands = (
        [STUB, "--port", str(p)],
        [STUB, "--port", str(d)],
        [
            "layerpush",
            "proxy",
            "--port",
            str(proxy),
            "--prefill",
            urls[0],
            "--decode",
            urls[1],
            "--log-level",
            "warning",
        ],
    )
    async with contextlib.AsyncExitStack() as stack:
        for command in commands:
            await stack.enter_async_context(_running(command))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        for url in urls:
            await _healthy(session, url)
        return [
            await _cell(session, urls[1], urls[2], length, width, requests)
            for length, width in itertools.product(lengths, widths)
        ]


async def _cell(
    session: aiohttp.ClientSession, direct: str, proxied: str, length: int, width: int, requests: int
) -> Cell:
    body = json.dumps(
        {"model": "stub", "prompt": list(range(length)), "max_tokens": ANSWER_TOKENS, "stream": True}
    ).encode()
    times: dict[str, list[Times]] = {direct: [], proxied: []}
    for _ in range(-(-requests // width)):
        for url in (direct, proxied):
            times[url] += await asyncio.gather(*(_request(session, url, body) for _ in range(width)))
    return Cell(length, width, times[direct], times[proxied])


async def _request(session: aiohttp.ClientSession, url: str, body: bytes) -> Times:
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", data=body) as response:
        response.raise_for_status()
        await response.content.readany()
        first = time.perf_counter()
        await response.content.read()
    return Times(first - began, time.perf_counter() - began)


@contextlib.asynccontextmanager
async def _running(module: Sequence[str]) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *module)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _healthy(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


def _quantile(values: Sequence[float], quantile: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * quantile) - 1]


if __name__ == "__main__":
    app()
