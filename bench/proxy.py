"""Overhead of `layerpush proxy`: the same requests to a stub engine, straight and through the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import aiohttp
import typer
from rich.console import Console

from bench import write
from bench.bootstrap import Difference, Ratio, difference_of_medians, ratio_of_medians
from bench.markdown import Result, conditions, number_table, with_interval
from bench.provenance import provenance
from bench.servers.ports import PortAllocator

STUB = "bench.stubengine"
ANSWER_TOKENS = 32
WARM_UP = 20
START_TIMEOUT_S = 60.0
SEED = 0
PACKAGES = ("layerpush", "aiohttp", "fastapi", "uvicorn")
Part = Literal["first", "whole"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class WrongAnswerError(Exception):
    """An answer through the proxy is not the engine's."""


@dataclass(frozen=True)
class Times:
    """Milliseconds from sending a request to the first byte of its answer, and to the last."""

    first: float
    whole: float


@dataclass
class Series:
    """All requests of one way: their times, and the duration of each round of ``streams`` requests at a time."""

    times: list[Times] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)

    def raw(self, part: Part) -> list[float]:
        return [getattr(each, part) for each in self.times]

    def as_json(self, part: Part) -> dict[str, object]:
        raw = self.raw(part)
        return {
            "median": round(statistics.median(raw), 3),
            "p99": round(statistics.quantiles(raw, n=100, method="inclusive")[98], 3),
            "raw": [round(each, 3) for each in raw],
        }


@dataclass(frozen=True)
class Cell:
    """All requests with prompts of one length, straight to D and through the proxy, in turn."""

    prompt_tokens: int
    streams: int
    direct: Series = field(default_factory=Series)
    proxied: Series = field(default_factory=Series)

    def added(self, part: Part) -> Difference:
        """Milliseconds of the median through the proxy less those of the median straight to D."""
        return difference_of_medians(self.proxied.raw(part), self.direct.raw(part), SEED)

    def ratio(self, part: Part) -> Ratio:
        return ratio_of_medians(self.proxied.raw(part), self.direct.raw(part), SEED)

    def as_json(self) -> dict[str, object]:
        parts: tuple[Part, ...] = ("first", "whole")
        ways = {"direct": self.direct, "proxied": self.proxied}
        return {
            "prompt_tokens": self.prompt_tokens,
            "streams": self.streams,
            "requests": len(self.direct.times),
            **{
                f"{part}_ms": {
                    **{name: series.as_json(part) for name, series in ways.items()},
                    "added": asdict(self.added(part)),
                    "ratio": asdict(self.ratio(part)),
                }
                for part in parts
            },
            "round_ms": {
                name: {
                    "median": round(statistics.median(series.round_ms), 3),
                    "raw": [round(each, 3) for each in series.round_ms],
                }
                for name, series in ways.items()
            },
        }


@app.command()
def main(
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, with commas.")] = "16,1024,32768",
    streams: Annotated[str, typer.Option(help="Numbers of streams at a time, with commas.")] = "1,64",
    requests: Annotated[int, typer.Option(min=2, help="Requests of each kind.")] = 400,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all times as JSON.")] = None,
) -> None:
    """Measure the overhead of `layerpush proxy` per request, with engines that answer at once.

    The stub engines and the proxy share this machine, so with few cores the overhead is an upper bound.

    Exit status: 1 when an answer differed; then nothing is written.
    """
    sizes, widths = ([int(part) for part in text.split(",")] for text in (lengths, streams))
    console = Console(soft_wrap=True)
    try:
        cells = asyncio.run(_measure(sizes, widths, requests))
    except WrongAnswerError as error:
        console.print(f"[red]{error}[/]")
        raise typer.Exit(1) from None
    head = provenance(SEED, PACKAGES) | {"answer_events": ANSWER_TOKENS + 1}
    result = head | {"cells": [cell.as_json() for cell in cells]}
    console.print(page_table(result), markup=False)
    if out is not None:
        write(out, result)


def page_table(result: Result) -> str:
    """One row per prompt length and number of streams."""
    rows = []
    for cell in result["cells"]:
        first, rounds = cell["first_ms"], cell["round_ms"]
        per_request = (rounds["proxied"]["median"] - rounds["direct"]["median"]) / cell["streams"]
        added = [cell[part]["added"] for part in ("first_ms", "whole_ms")]
        rows.append(
            (
                str(cell["prompt_tokens"]),
                str(cell["streams"]),
                *(f"{first[way]['median']:.1f} ms" for way in ("direct", "proxied")),
                *(f"{one['difference']:.1f} ms [{one['low']:.1f}, {one['high']:.1f}]" for one in added),
                with_interval(first["ratio"]),
                f"{per_request:.1f} ms",
            )
        )
    added_headings = ("added", "added to the last byte", "proxied/straight", "per request")
    requests = "/".join(map(str, sorted({cell["requests"] for cell in result["cells"]})))
    about = (
        f"Time to the first byte, median of {requests} streams of {result['answer_events']} events from an engine that "
        "answers at once, straight and through the proxy in turn, with 95 % intervals. Client, proxy, P and D share "
        "the machine, so many streams at a time wait for its cores. The last column matters there: the additional time "
        "of a round, divided by its number of streams."
    )
    table = number_table(("tokens", "at a time", "straight", "proxied", *added_headings), rows)
    return f"{table}\n\n{about} {conditions(result)}"


async def _measure(lengths: Sequence[int], widths: Sequence[int], requests: int) -> list[Cell]:
    ports = PortAllocator()
    p, d, proxy = (ports.take() for _ in range(3))
    urls = [f"http://127.0.0.1:{port}" for port in (p, d, proxy)]
    engines = ["--prefill", urls[0], "--decode", urls[1]]
    commands = (
        [STUB, "--port", str(p)],
        [STUB, "--port", str(d)],
        ["layerpush", "proxy", "--port", str(proxy), *engines, "--log-level", "warning"],
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
    answer, cell = await _warm_up(session, (direct, proxied), body, width), Cell(length, width)
    ways = [(direct, cell.direct), (proxied, cell.proxied)]
    for number in range(-(-requests // width)):
        for url, series in ways if number % 2 else reversed(ways):
            began = time.perf_counter()
            answers = await asyncio.gather(*(_request(session, url, body) for _ in range(width)))
            series.round_ms.append(1e3 * (time.perf_counter() - began))
            series.times += [times for times, _ in answers]
            if any(data != answer for _, data in answers):
                raise WrongAnswerError(f"{url} gave another answer than the engine")
    return cell


async def _warm_up(session: aiohttp.ClientSession, urls: Sequence[str], body: bytes, width: int) -> bytes:
    """Make all connections before the first sample. Returns D's answer."""
    for _ in range(-(-WARM_UP // width)):
        for url in reversed(urls):
            answers = await asyncio.gather(*(_request(session, url, body) for _ in range(width)))
    return answers[0][1]


async def _request(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[Times, bytes]:
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", data=body) as response:
        response.raise_for_status()
        beginning = await response.content.readany()
        first = time.perf_counter()
        answer = beginning + await response.content.read()
    return Times(1e3 * (first - began), 1e3 * (time.perf_counter() - began)), answer


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


if __name__ == "__main__":
    app()
