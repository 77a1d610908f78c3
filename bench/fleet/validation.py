"""``python -m bench.fleet.validation``: the same requests through real engines and through the simulation.

Two P and two D: vLLM, NIXL and layerpush, with one emulated link between the P and the D. The layers of P take a set
time (``bench.fleet.timed``), so that neither the two cores nor their caches are measured. First come single requests,
one at a time. Their traces give the simulation its speeds. Then requests come at random times, in each mode the same
ones at the same times, to engines and to the simulation: with the speeds of single requests, and with P's layers at
the times of the run, and the speed that the link had in it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer

from bench import OUTPUT, write
from bench.command import console
from bench.fleet import page
from bench.fleet.arrivals import Arrival, Trace, arrivals
from bench.fleet.fleet import Fleet, Plan
from bench.fleet.presets import LAYER_TOKEN_S, RankModel
from bench.fleet.recorded import RecordedFleet, RecordedStep, recorded_steps, step_gaps
from bench.provenance import provenance
from bench.serve.engine_options import folder
from bench.servers.engines import EngineFailedError, EngineGroup, EngineServer, EngineSpec, ServerPlace
from bench.servers.interrupts import Interrupted, Interrupts
from bench.servers.link import LinkError
from bench.servers.load import GreedyAnswer, RequestFailedError, complete_disaggregated, make_prompt
from bench.servers.model import ModelShape, write_model
from bench.servers.workspace import places_of, work_directory
from layerpush.apps.tracing.requests import read_traces
from layerpush.core.config import CONNECTOR_NAME
from layerpush.core.prefill_identity import remote_request_id
from layerpush.core.push_mode import PushMode
from layerpush.telemetry.trace_records import PushRecord

RATE, BURST = "400mbit", "128kb"
SHAPE = ModelShape(layers=8, hidden=256, heads=4, kv_heads=4, intermediate=256, max_positions=4096)
STEP_TOKENS, BLOCK_TOKENS, KV_BYTES = 512, 32, 512 << 20
MODES = (PushMode.AUTO, PushMode.LAYER, PushMode.WHOLE)
ALONE = (256, 512, 1024, 1536, 2048)
"""Tokens of the prompts that come one at a time."""
PROMPTS = Trace("256 to 2048 tokens", prompt=(256, 300, 500, 900, 1300, 1700, 1900, 2000, 2048), answer=(4,) * 9)
ANSWER_TOKENS, SEED, WARM_UP_S = 4, 0, 5.0
FIRST = 4
"""Requests, one for each pair of a P and a D, that make the connections."""
ONE_AT_A_TIME = (
    [Arrival(5.0 * n, n, tokens, ANSWER_TOKENS, 0) for n, tokens in enumerate((*ALONE[-1:] * FIRST, *ALONE))],
    5.0 * FIRST - 1.0,
)
"""Simulated turns, and the seconds of the first ones."""
ENGINES = Plan(prefill=2, decode=2, oversubscription=2.0, router="round_robin", warm_up=WARM_UP_S, seed=SEED)
"""With two engines in a rack and this oversubscription, the rack's link has the bandwidth of one card."""
LONGEST = 10
WRONG, BROKEN = 1, 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@dataclass
class RequestSample:
    """One request through the engines. ``at`` seconds after the first one's time."""

    at: float
    mode: PushMode
    tokens: int
    answer: GreedyAnswer
    ended_at: float
    push: PushRecord | None = None

    @property
    def exposed_s(self) -> float:
        assert self.push is not None
        exposed = self.push.exposed_s(self.push.t_last_ready)
        assert exposed is not None
        return exposed


@dataclass
class TwoPairs:
    """Two P and two D. The router's order is that of the simulation: P and D in turn, so that each P meets each D."""

    prefill: Sequence[EngineServer]
    decode: Sequence[EngineServer]
    prompts: Mapping[tuple[int, int], list[int]] = field(default_factory=dict)
    samples: list[RequestSample] = field(default_factory=list)

    async def send(
        self, session: aiohttp.ClientSession, number: int, tokens: int, mode: PushMode, at: float = 0.0
    ) -> RequestSample:
        """Request ``number`` of a series; equal numbers and lengths are equal prompts."""
        p, d = self.prefill[number % 2], self.decode[number // 2 % 2]
        prompt = make_prompt(tokens, SEED + number, SHAPE.vocabulary)
        answer = await complete_disaggregated(session, p, d, prompt, ANSWER_TOKENS, mode.value)
        return RequestSample(at, mode, tokens, answer, time.perf_counter())

    async def alone(self, session: aiohttp.ClientSession) -> list[RequestSample]:
        """One request at a time, after one to each pair that warms it up."""
        for number in range(FIRST):
            await self.send(session, number, ALONE[-1], PushMode.LAYER)
        cells = product(MODES, ALONE)
        return [await self.send(session, number, tokens, mode) for number, (mode, tokens) in enumerate(cells)]

    async def loaded(
        self, session: aiohttp.ClientSession, mode: PushMode, turns: Sequence[Arrival]
    ) -> list[RequestSample]:
        """Requests at their times."""
        began = time.perf_counter() + 0.1

        async def one(number: int, turn: Arrival) -> RequestSample:
            await asyncio.sleep(began + turn.at - time.perf_counter())
            return await self.send(session, number, turn.tokens, mode, turn.at)

        return list(await asyncio.gather(*(one(number, turn) for number, turn in enumerate(turns))))


@dataclass(frozen=True)
class EngineSpeeds:
    """Of the engines, in seconds and bytes a second. ``other_s``: of a request, before P's first step and after D's
    load: HTTP, vLLM's front end and schedulers.
    """

    token_s: float
    step_gap_s: float
    link: float
    write_s: float
    decode_s: float
    other_s: float = 0.0

    def simulate(
        self, mode: PushMode, turns: Sequence[Arrival], warm_up: float, steps: Sequence[RecordedStep] = ()
    ) -> dict[str, list[float]]:
        """Times of the requests and pushes after the warm-up. With ``steps`` P's times are those of the run."""
        kv_tokens = KV_BYTES // SHAPE.kv_bytes_per_token
        layer_bytes = SHAPE.kv_bytes_per_token // SHAPE.layers
        times = (self.token_s, 0.0, self.decode_s, kv_tokens, STEP_TOKENS, BLOCK_TOKENS, self.step_gap_s)
        model = RankModel("the engines'", SHAPE.layers, layer_bytes, *times)
        seconds = turns[-1].at + 1.0
        plan = replace(ENGINES, mode=mode, seconds=seconds, warm_up=warm_up, card=self.link, write_s=self.write_s)
        fleet = RecordedFleet(steps, plan, model, turns) if steps else Fleet(plan, model, turns)
        fleet.run()
        other_s = 0.0 if steps else self.other_s
        return {"exposed_s": fleet.outcome.exposed, "ttft_s": [other_s + each for each in fleet.outcome.ttft]}


def speeds(alone: Sequence[RequestSample]) -> EngineSpeeds:
    """The speeds of requests that came one at a time: least squares over steps, and over WRITEs by layer and whole."""
    streamed = [each for each in alone if each.mode is PushMode.LAYER]
    steps = [(each.tokens, -(-each.tokens // STEP_TOKENS) - 1) for each in streamed]
    token_s, step_gap_s = np.linalg.lstsq(np.asarray(steps, float), [_prefill_s(each.push) for each in streamed])[0]
    sizes, times = zip(
        *(pair for each in alone if each.mode is not PushMode.AUTO for pair in _writes(each)), strict=True
    )
    byte_s, write_s = np.polyfit(sizes, times, 1)
    decode_s = median((each.ended_at - each.answer.first_token_at) / (ANSWER_TOKENS - 1) for each in alone)
    found = EngineSpeeds(
        float(token_s), max(0.0, float(step_gap_s)), 1 / float(byte_s), max(0.0, float(write_s)), decode_s
    )
    simulated = [each for mode in MODES for each in found.simulate(mode, *ONE_AT_A_TIME)["ttft_s"]]
    return replace(found, other_s=median(r.answer.ttft_s - s for r, s in zip(alone, simulated, strict=True)))


def steps_of(series: Sequence[RequestSample]) -> list[RecordedStep]:
    """P's steps in a series, from the time on at which it began."""
    pushes = [each.push for each in series if each.push is not None]
    return recorded_steps(pushes, ENGINES.prefill, min(each.answer.sent_at - each.at for each in series))


def link_speed(series: Sequence[RequestSample]) -> float:
    """Bytes a second in the ``LONGEST`` times without a pause on the link."""
    busy = list[list[float]]()
    for posted, landed, size in sorted(times for each in series for times in _times_of_writes(each)):
        if not busy or posted > busy[-1][1]:
            busy.append([posted, landed, 0.0])
        busy[-1][1:] = max(landed, busy[-1][1]), busy[-1][2] + size
    longest = sorted(busy, key=lambda time: time[0] - time[1])[:LONGEST]
    return sum(size for _, _, size in longest) / sum(end - begin for begin, end, _ in longest)


def _prefill_s(push: PushRecord | None) -> float:
    assert push is not None
    assert push.t_last_ready is not None
    assert push.t_first_planned is not None
    return push.t_last_ready - push.t_first_planned


def _times_of_writes(sample: RequestSample) -> Iterator[tuple[float, float, int]]:
    """From the post of each WRITE until it has landed, and its bytes. Records of whole pushes have no bytes."""
    assert sample.push is not None
    for each in sample.push.writes:
        assert each.t_landed is not None
        yield each.t_post, each.t_landed, each.bytes or sample.tokens * SHAPE.kv_bytes_per_token


def _writes(sample: RequestSample) -> Iterator[tuple[int, float]]:
    """Bytes of each WRITE, and its seconds on the wire: the one before is over when it begins."""
    free = 0.0
    for posted, landed, size in _times_of_writes(sample):
        yield size, landed - max(free, posted)
        free = landed


def spec(name: str, place: ServerPlace, model: Path, trace: Path, *, decodes: bool) -> EngineSpec:
    """D starts with P's token, as in the simulation."""
    config = {"trace_dir": str(trace), **({"first_token": "prefill"} if decodes else {})}
    return EngineSpec(
        name,
        "decode" if decodes else "prefill",
        model,
        CONNECTOR_NAME if decodes else "TimedPushConnector",
        None if decodes else "bench.fleet.timed",
        config,
        tokens_per_step=STEP_TOKENS,
        max_model_len=SHAPE.max_positions,
        kv_cache_bytes=KV_BYTES,
        block_size=BLOCK_TOKENS,
        place=place,
    )


async def measure(
    engines: TwoPairs, turns: Sequence[Arrival], say: Callable[[str], None]
) -> tuple[list[RequestSample], dict[PushMode, list[RequestSample]]]:
    """Requests one at a time, and then the series in each mode."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:
        alone = await engines.alone(session)
        say(f"{len(alone)} requests one at a time")
        loaded = {}
        for mode in MODES:
            loaded[mode] = await engines.loaded(session, mode, turns)
            say(f"{mode}: {len(turns)} requests in {turns[-1].at:.0f} s")
    return alone, loaded


def cell(
    mode: PushMode, requests: str, samples: Sequence[RequestSample], simulated: Mapping[str, Any]
) -> dict[str, Any]:
    """All times of a mode, real and simulated."""
    real = {"exposed_s": [each.exposed_s for each in samples], "ttft_s": [each.answer.ttft_s for each in samples]}
    return {"mode": mode.value, "requests": requests, "engines": real, "simulated": simulated}


def busy_s() -> float:
    """Processor seconds of the whole machine so far (``/proc/stat``: user, nice, system, and interrupts)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return sum(int(fields[index]) for index in (1, 2, 3, 6, 7)) / 100


@app.command()
def main(
    load: Annotated[float, typer.Option(help="Share of P's time for prefill.")] = 0.5,
    seconds: Annotated[float, typer.Option(min=10, help="Seconds in which requests come, in each mode.")] = 60.0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="All times as JSON.")] = OUTPUT / "validation.json",
    keep_logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep logs and traces in DIR.")] = None,
) -> None:
    """Send the same requests to two P and two D, real and simulated: do exposed time and time to first token agree?

    Needs root and iproute2 for the emulated link. The bench compares the answers of all modes. If one differs, it
    writes nothing.

    - python -m bench.fleet.validation --seconds 20
    """
    where, began, about = console(), time.monotonic(), provenance(SEED)
    draw = random.Random(SEED)
    mean_s = fmean(turn.tokens for turn in arrivals(PROMPTS, 1.0, 0.0, 4000.0, random.Random(SEED)))
    mean_s *= LAYER_TOKEN_S * SHAPE.layers
    turns = list(arrivals(PROMPTS, load * ENGINES.prefill / mean_s, 0.0, seconds, draw))
    try:
        with Interrupts() as interrupts, work_directory(keep_logs) as work:
            with (
                places_of(RATE, interrupts, BURST) as places,
                EngineGroup(work, interrupts, forks=True) as group,
            ):
                model, trace = write_model(folder("validation"), SHAPE), work / "trace"
                p, d = (
                    [group.start(spec(f"{side}{n}", place, model, trace, decodes=side == "d")) for n in range(2)]
                    for side, place in zip("pd", places, strict=True)
                )
                group.wait_ready([*p, *d])
                used, at = busy_s(), time.monotonic()
                alone, loaded = asyncio.run(measure(TwoPairs(p, d), turns, where.print))
                busy = (busy_s() - used) / (time.monotonic() - at)
            traced = {request.name: request for request in read_traces([trace]).requests}
            for each in (*alone, *(sample for samples in loaded.values() for sample in samples)):
                (each.push,) = traced[remote_request_id(each.answer.request_id)].pushes
    except Interrupted as interrupted:
        where.print(f"[yellow]{interrupted}; all servers are down.[/]")
        raise typer.Exit(interrupted.exit_status) from None
    except (EngineFailedError, RequestFailedError, LinkError) as error:
        where.print(str(error), style="red", markup=False)
        raise typer.Exit(BROKEN) from None
    answers = [[each.answer.tokens for each in samples] for samples in loaded.values()]
    if any(each != answers[0] for each in answers):
        where.print("The modes' answers differ. Nothing is written: these times mean nothing.", style="red")
        raise typer.Exit(WRONG)
    measured = speeds(alone)
    cells = []
    for mode in MODES:
        later = [each for each in loaded[mode] if each.at >= WARM_UP_S]
        single = [each for each in alone if each.mode is mode]
        cells.append(cell(mode, "one at a time", single, measured.simulate(mode, *ONE_AT_A_TIME)))
        cells.append(cell(mode, "at random times", later, measured.simulate(mode, turns, WARM_UP_S)))
        steps = steps_of(loaded[mode])
        own = {"step_gap_s": fmean(step_gaps(steps)), "link": link_speed(loaded[mode])}
        as_in_the_run = replace(measured, **own).simulate(mode, turns, WARM_UP_S, steps)
        found = cell(mode, "at random times, P's layers and the link as in the run", later, as_in_the_run)
        full = [each for each in steps if each.blocks * BLOCK_TOKENS == STEP_TOKENS]
        found["token_s"] = [(each.end - each.at) / STEP_TOKENS for each in full]
        cells.append({**found, **own, "steps": [asdict(step) for step in steps]})
    result = {
        **about,
        "seconds": round(time.monotonic() - began),
        "settings": {"rate": RATE, "burst": BURST, "load": load, "requests": len(turns), "step_tokens": STEP_TOKENS},
        "model": {**asdict(SHAPE), "kv_bytes_per_token": SHAPE.kv_bytes_per_token},
        "measured": asdict(measured),
        "busy_cores": busy,
        "cells": cells,
    }
    where.print(page.validation_table(result), markup=False, soft_wrap=True)
    write(out, result)


if __name__ == "__main__":
    app()
