"""The cost of requests that only wait: the writer's turns while no message comes.

The writer's own loop runs with its own objects; only the worker and the network are scripted. On D loads wait for P. On
P pushes, whose prefill is over, wait for D's registration.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from bench import OUTPUT, write
from bench.command import console, numbers
from bench.provenance import provenance
from bench.rank import Rank
from layerpush.core.layout import CacheLayout, LayerSlots, Region
from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import PromptProgress, StepPlan
from layerpush.core.wire import Registration
from layerpush.engine.worker.wake import Waker
from layerpush.telemetry.metrics.loop_lag import LoopLag
from layerpush.telemetry.trace_file import TraceFile
from layerpush.transport.peers import Address, Handshake, Peers

LAYERS, TOKENS, BLOCK_TOKENS = 32, 1024, 16
SAMPLE_S = 1.0
TURNS = 1000
P = Address("P", "127.0.0.1", 5600, 1)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


class Quiet:
    """The worker and the network, in which nothing happens. One prefill engine is connected."""

    engine_id, world_size, tp_rank = "D", 1, 0

    def __init__(self) -> None:
        self.queued: deque[tuple[str, Any]] = deque()
        self.peers = Peers()
        self.peers["P"].handshake = Handshake(Future(), P)
        self.transport = self

    def __getattr__(self, name: str) -> Any:
        answers = {"agents_of": {"p-0": (0, 0)}, "engines": ["P"], "knows": True}
        empty = {"ended_requests": (), "deferred_pushes": ()}
        return lambda *_, **__: {**answers, **empty}.get(name)

    def notifications(self) -> list[tuple[str, bytes]]:
        return []

    def tasks(self) -> list[tuple[str, Any]]:
        return [self.queued.popleft() for _ in range(len(self.queued))]


class TimedWaker(Waker):
    """Sums up the processor seconds between the waiting thread's sleeps. A sleep itself does not hold Python's lock."""

    awake_s = since = 0.0

    def wait(self, poll_timeout: float, *, polls_layers: bool = False) -> bool:
        self.awake_s += time.thread_time() - self.since
        try:
            return super().wait(poll_timeout, polls_layers=polls_layers)
        finally:
            self.since = time.thread_time()


class WaitingRank(Rank):
    """A rank without an engine. The main thread queues work for its writer. P's engine is always in use."""

    def __init__(self) -> None:
        quiet: Any = Quiet()
        self.queued, lag = quiet.queued, LoopLag()
        self.timer = TimedWaker(lag.woken)
        layers = [LayerSlots(f"layers.{layer}", 0, (layer,)) for layer in range(LAYERS)]
        layout = CacheLayout(tuple(layers), tuple(Region(layer << 30, 1 << 16, 4096) for layer in range(LAYERS)))
        super().__init__(quiet, layout, PushMode.LAYER, self.timer, lag, TraceFile(None, "P", 0))

    @property
    def engines_in_use(self) -> set[str]:
        return {"P"}

    def waits(self, side: str, requests: int) -> None:
        """So many requests begin to wait."""
        if side == "P" and requests:
            table = [list(range(1, 1 + TOKENS // BLOCK_TOKENS))]
            prompts = [PromptProgress(f"r-{number}", (BLOCK_TOKENS,)) for number in range(requests)]
            chunks = [prompt.advance(0, TOKENS, TOKENS, table) for prompt in prompts]
            self.steps.arm(StepPlan(tuple(chunk for chunk in chunks if chunk is not None)))
            self.steps.sweep()
            for number in range(requests):
                self.steps.finish(f"r-{number}", tuple(table))
        for number in range(requests if side == "D" else 0):
            wanted = Registration(
                request_id=f"r-{number}", decode_engine_id="D", decode_host="127.0.0.1", decode_port=5601,
                decode_tp_size=1, local_block_ids=(tuple(range(64)),), layerpush=1,
            )  # fmt: skip
            self.queued.append(("", lambda wanted=wanted: self.loads.register(wanted, P, {}, time.perf_counter())))
        self.waker.wake()


def sample(side: str, requests: int) -> tuple[float, float]:
    """While so many requests wait: the share of Python's lock that a fresh writer takes, and the processor seconds of
    a turn that visits every part and finds nothing.
    """
    rank = WaitingRank()
    thread = threading.Thread(target=rank.writer.run, daemon=True)
    thread.start()
    rank.waits(side, requests)
    time.sleep(0.2)
    waiting = len(rank.loads) if side == "D" else len(rank.pushes.waiting())
    assert waiting == requests, f"{waiting} of {requests} requests wait on {side}"
    began, used = time.perf_counter(), rank.timer.awake_s
    time.sleep(SAMPLE_S)
    share = (rank.timer.awake_s - used) / (time.perf_counter() - began)
    rank.writer._stop.set()
    rank.waker.set()
    thread.join()
    used = time.thread_time()
    for _ in range(TURNS):
        rank.writer._due = 0.0
        rank.writer.turn(woken=False)
    return share, (time.thread_time() - used) / TURNS


@app.command()
def main(
    requests: Annotated[str, typer.Option(help="Numbers of waiting requests, beside none.")] = "1,64,256",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each cell, in any order.")] = 5,
    out: Annotated[Path, typer.Option(metavar="FILE", help="All samples as JSON.")] = OUTPUT / "waiting.json",
) -> None:
    """Measure the writer's share of Python's lock while requests wait on D, and on P, and the length of its turns.

    - python -m bench.waiting --requests 256 --rounds 10
    """
    about = provenance(seed=0)
    cells = [(side, number) for side in ("D", "P") for number in (0, *numbers(requests))]
    logging.disable(logging.WARNING)  # no forward pass calls hooks here
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {cell: [] for cell in cells}
    draw = random.Random(0)
    for _ in range(rounds):
        for side, number in draw.sample(cells, len(cells)):
            samples[side, number].append(sample(side, number))
    rows: list[dict[str, Any]] = [
        {"side": side, "requests": number, "share": [share for share, _ in cell], "turn_s": [turn for _, turn in cell]}
        for (side, number), cell in samples.items()
    ]
    write(out, {**about, "seconds": SAMPLE_S, "rounds": rounds, "rows": rows})
    for row in rows:
        share, turn = 100 * median(row["share"]), 1e6 * median(row["turn_s"])
        console().print(f"{row['side']} {row['requests']:4} wait: {share:.2f} % of the lock, {turn:.0f} us a turn")


if __name__ == "__main__":
    app()
