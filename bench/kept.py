"""The time to the first token after the death of a P in the middle of a long prompt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console

from bench import OUTPUT, keptpage
from bench.command import console, numbers, publish, running
from bench.demo.cluster import BLOCK_SIZE, MODES, TOKENS_PER_STEP
from bench.demo.measure import expected_tokens
from bench.keptpage import KEPT, NOTHING, STOCK
from bench.provenance import provenance
from bench.serve.engine_options import LONG_SHAPE, ROOM_TOKENS, folder
from bench.servers.engines import EngineGroup, EngineServer, EngineSpec
from bench.servers.load import GreedyAnswer, RequestFailedError, complete, make_prompt, to_decode
from bench.servers.model import write_model
from layerpush.apps.tracing.requests import read_traces
from layerpush.core.config import CONNECTOR_NAME
from layerpush.core.prefill_identity import TO_PREFILL, remote_request_id

SHAPE = replace(LONG_SHAPE, layers=4)
SEED, ANSWER_TOKENS = 0, 16
PROMPTS_OF_ROOM = 3
LOOK_S = 0.02
STOCK_LIMIT_S = 20.0
"""`push_registration_timeout` of stock engines."""
PEER_TIMEOUT_S = 4
USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", re.MULTILINE)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@dataclass
class DeathSample:
    """One prompt of which P died: ``died_s`` seconds after the request, at ``died_at`` of ``time.perf_counter()``.
    ``noticed_s``, ``first_token_s``: from P's death; None if that did not happen. ``waited_s``: the client's wait
    after P's death without a first token.
    """

    mode: str
    percent: int
    round: int
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    died_at: float = 0.0
    died_s: float = 0.0
    noticed_s: float | None = None
    first_token_s: float | None = None
    waited_s: float | None = None
    kept_tokens: int = 0


@dataclass
class KeptBench:
    """``tokens``: the length of the prompts. ``group`` starts the engines, ``work`` has their traces."""

    tokens: int
    group: EngineGroup
    work: Path
    out: Console
    model: Path
    samples: list[DeathSample] = field(default_factory=list)
    wrong: int = 0
    started: int = 0

    def spec(self, name: str, mode: str, *, decodes: bool) -> EngineSpec:
        """P or D of a mode."""
        config: Mapping[str, object] = {"push_registration_timeout": STOCK_LIMIT_S}
        if mode != STOCK:
            traced = {"trace_dir": str(self.work / "trace"), "peer_timeout_s": PEER_TIMEOUT_S}
            config = traced if decodes else MODES["auto"]
        length = -(-(self.tokens + ANSWER_TOKENS + ROOM_TOKENS) // BLOCK_SIZE) * BLOCK_SIZE
        return EngineSpec(
            name,
            "decode" if decodes else "prefill",
            self.model,
            "NixlPushConnector" if mode == STOCK else CONNECTOR_NAME,
            extra_config=config,
            recomputes=decodes,
            tokens_per_step=TOKENS_PER_STEP,
            max_model_len=length,
            kv_cache_bytes=PROMPTS_OF_ROOM * length * SHAPE.kv_bytes_per_token,
            block_size=BLOCK_SIZE,
            options=("--enable-prefix-caching",) if decodes and mode == KEPT else (),
        )

    def start(self, *specs: EngineSpec) -> list[EngineServer]:
        """Start engines, and wait until they answer."""
        engines = [self.group.start(spec) for spec in specs]
        self.group.wait_ready(engines)
        return engines

    async def kill(self, sample: DeathSample, d: EngineServer, prompt: Sequence[int]) -> asyncio.Task[GreedyAnswer]:
        """Kill a new P in the middle of a prompt. Returns D's answer to come."""
        self.started += 1
        (p,) = self.start(self.spec(f"prefill-{self.started}", sample.mode, decodes=False))
        to_d = to_decode(p, sample.request_id)
        session, sent_at = self.session, time.perf_counter()
        sent = {"request_id": sample.request_id}
        decoding = asyncio.create_task(complete(session, d, prompt, ANSWER_TOKENS, **sent, kv_transfer_params=to_d))
        prefilling = asyncio.create_task(complete(session, p, prompt, 1, **sent, kv_transfer_params=TO_PREFILL))
        while await self._computed(p) < sample.percent / 100 * self.tokens:
            if prefilling.done():
                raise RequestFailedError(f"{p.name} has ended the prompt before {sample.percent} %")
            await asyncio.sleep(LOOK_S)
        for pid in p.members():
            with contextlib.suppress(ProcessLookupError):  # it ends with the one before
                os.kill(pid, signal.SIGKILL)
        sample.died_at = time.perf_counter()
        sample.died_s = sample.died_at - sent_at
        await asyncio.gather(prefilling, return_exceptions=True)
        self.group.stop([p])
        return decoding

    async def measure(self, percents: Sequence[int], rounds: int, wait_s: float) -> None:
        """Measure each mode at each percentage, stock push once."""
        decode = {mode: self.spec(f"decode-{mode}", mode, decodes=True) for mode in (KEPT, NOTHING, STOCK)}
        d = dict(zip(decode, self.start(*decode.values()), strict=True))
        cells = [(number, percent) for number in range(rounds) for percent in percents]
        prompts = [make_prompt(self.tokens, SEED + index, SHAPE.vocabulary) for index in range(len(cells))]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as self.session:
            self.out.print(f"{len(prompts)} prompts of {self.tokens} tokens without a transfer: the right answers")
            right = await expected_tokens(self.session, (d[NOTHING], d[STOCK]), prompts, ANSWER_TOKENS, lambda: None)
            await self._stock(d[STOCK], percents, prompts, wait_s)
            self.group.stop([d[STOCK]])
            for index, (number, percent) in enumerate(cells):
                for mode in (KEPT, NOTHING)[:: 1 if index % 2 else -1]:
                    sample = DeathSample(mode, percent, number)
                    answer = await (await self.kill(sample, d[mode], prompts[index]))
                    sample.first_token_s = answer.first_token_at - sample.died_at
                    self.wrong += answer.tokens != right[index]
                    self.samples.append(sample)
                    self.out.print(f"{mode}, {percent} %: first token {sample.first_token_s:.1f} s after P's death")

    async def _stock(
        self, d: EngineServer, percents: Sequence[int], prompts: Sequence[Sequence[int]], wait_s: float
    ) -> None:
        """D waits for all of them at once."""
        waiting: dict[asyncio.Task[GreedyAnswer], DeathSample] = {}
        for percent, prompt in zip(percents, prompts, strict=False):
            sample = DeathSample(STOCK, percent, 0)
            waiting[await self.kill(sample, d, prompt)] = sample
        await asyncio.wait(waiting, timeout=wait_s)
        for task, sample in waiting.items():
            if task.done():
                sample.first_token_s = task.result().first_token_at - sample.died_at
            else:
                sample.waited_s = time.perf_counter() - sample.died_at
            task.cancel()
            self.samples.append(sample)
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _computed(self, p: EngineServer) -> float:
        """Tokens of the prompt that have a block on P."""
        async with self.session.get(f"{p.url}/metrics") as response:
            found = USAGE.search(await response.text())
        blocks = (p.spec.kv_cache_bytes or 0) // (BLOCK_SIZE * SHAPE.kv_bytes_per_token)
        return float(found[1]) * (blocks - 1) * BLOCK_SIZE if found else 0.0

    def read_traces(self) -> None:
        """When D noticed P's death, and what it kept."""
        loads = {request.name: request.loads[0] for request in read_traces([self.work / "trace"]).requests}
        sent = {sample.request_id: sample for sample in self.samples if sample.mode != STOCK}
        for request_id, sample in sent.items():
            load = loads[remote_request_id(request_id)]
            assert load.t_settled is not None
            sample.kept_tokens, sample.noticed_s = load.kept_tokens, load.t_settled - sample.died_at


@app.command()
def main(
    tokens: Annotated[int, typer.Option(min=TOKENS_PER_STEP, help="Tokens of a prompt.")] = 32768,
    percents: Annotated[str, typer.Option(help="The parts of a prompt after which P dies.")] = "10,50,90",
    rounds: Annotated[int, typer.Option(min=1, help="Deaths at each percentage; of stock engines one.")] = 3,
    wait: Annotated[float, typer.Option(help="Seconds of wait for stock engines.")] = 30.0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="All samples as JSON.")] = OUTPUT / "kept.json",
    keep_logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep logs and traces in DIR.")] = None,
) -> None:
    """Kill P in the middle of a long prompt: how soon is D's first token there?

    D keeps what has landed, or has no prefix cache and keeps nothing. Beside them vLLM's push connector. The bench
    compares all answers with those of a D that computes alone. If one differs, it writes nothing.

    - python -m bench.kept --tokens 4096 --rounds 1 --wait 5
    """
    began, where, about = time.monotonic(), console(), provenance(SEED)
    with running(where, keep_logs) as (work, interrupts):
        with EngineGroup(work, interrupts, forks=True) as group:
            bench = KeptBench(tokens, group, work, where, write_model(folder("kept"), SHAPE))
            asyncio.run(bench.measure(numbers(percents, 1, 99), rounds, wait))
        bench.read_traces()
    result: dict[str, Any] = {
        **about,
        "seconds": round(time.monotonic() - began),
        "settings": {"tokens": tokens, "rounds": rounds, "wait_s": wait, "peer_timeout_s": PEER_TIMEOUT_S,
                     "stock_limit_s": STOCK_LIMIT_S, "step_tokens": TOKENS_PER_STEP},
        "model": {**asdict(SHAPE), "kv_bytes_per_token": SHAPE.kv_bytes_per_token},
        "wrong": bench.wrong,
        "samples": [asdict(sample) for sample in bench.samples],
    }  # fmt: skip
    publish(where, out, result, keptpage.table)


if __name__ == "__main__":
    app()
