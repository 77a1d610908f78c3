"""P's process: a forward on the main thread, the connector's hooks in it, and a writer thread that pushes.

A script. Arguments: file descriptors of its ends of two socket pairs, with the command and with D.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.forward.cases import Case
from bench.forward.cells import OFF, VERIFY, CaseSamples, Series
from bench.forward.compute import Mark, Products, Prompts
from bench.forward.cores import bind_this_thread, queued_s, this_thread_on
from bench.forward.draws import Draw
from bench.forward.end import GONE, ProcessSide, digest_of, settle
from bench.forward.kv import Noise
from bench.forward.lane import Lane, Pusher
from bench.forward.models import BLOCK_TOKENS
from bench.forward.orders import (
    Check,
    CheckCeiling,
    Checked,
    CheckRest,
    Introduction,
    Measure,
    RegisterBlocks,
    UseCache,
    WrongBytesError,
)
from bench.forward.reach import DECODE, OWN, Reach
from bench.forward.settings import ForwardSettings
from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import PromptProgress, StepPlan
from layerpush.prefill.pushes import WRITE_POLL_S
from layerpush.transport.base import Route, WriteState

CEILING_BYTES = 64 << 20
RUN_UP_BYTES = 2 << 20
"""Bytes sent before the ceiling's WRITE: more than an emulated link lets through at once after a rest."""
LAND_TIMEOUT_S = 60.0
SLOWEST = 20e6
"""The least rate of a link, in bytes a second. A slower push counts as hung."""


class PushError(RuntimeError):
    """A push failed or did not end, so it has no figures."""


def as_the_writer(settings: ForwardSettings) -> AbstractContextManager[None]:
    """The main thread posts WRITEs of its own on the cores of the writer thread, which posts all others."""
    return this_thread_on(settings.cores.others if settings.cores else ())


class ForwardBench:
    """The reach and the lanes of all modes, for one geometry."""

    def __init__(self, end: ProcessSide, reach: Reach, pusher: Pusher) -> None:
        self.reach = reach
        self.lanes: dict[str, Lane] = {mode: Lane(mode, reach, end.transport, pusher.waker) for mode in PushMode}
        for way, share in VERIFY.items():
            self.lanes[way] = Lane(PushMode.AUTO, reach, end.transport, pusher.waker, share)


class PrefillEnd:
    """P and D have equal ``settings``."""

    def __init__(self, link: str, decode: Connection, settings: ForwardSettings) -> None:
        self._link = link
        self._decode = decode
        self._settings = settings
        self._end = ProcessSide("P", settings)
        self._geometry: UseCache | None = None
        self._requests = 0
        self._noise = Noise(settings.noise_bytes, settings.seed, self._end.device)
        self._other: Introduction = self._decode.recv()
        self._decode.send(self._end.introduction(digest_of(self._noise.bytes)))
        self._end.agent.add_remote_agent(self._other.metadata)
        self._pusher = Pusher(self._end.transport)
        bind_this_thread(settings.cores.forward if settings.cores else ())  # every thread so far is on the other cores
        self._products = Products(settings.layer_s, self._end.device)
        self._bench: ForwardBench | None = None
        self._turn = 0

    def obey(self, order: Measure) -> CaseSamples:
        """Raises ``WrongBytesError`` when a byte is not where it must be."""
        case, bench = order.case, self._bench_for(order.case)
        draws = case.draws(bench.reach.cache.blocks, self._settings.seed)
        prompts = Prompts(bench.reach.cache, draws, self._noise)
        ways = (OFF, *order.modes)
        series, ceiling_s = {way: Series() for way in ways}, []
        ceiling_bytes = min(CEILING_BYTES, self._end.ring.numel(), self._settings.noise_bytes)
        for turn in range(-1, order.rounds):
            ceiling = self._ceiling(ceiling_bytes)
            first = turn % len(ways)
            taken = {way: Series() for way in ways}
            for way in ways[first:] + ways[:first]:
                self._sample(bench, way, case, draws, prompts, taken[way])
            if turn >= 0:  # the round before warmed everything up
                ceiling_s.append(ceiling)
                for way in ways:
                    series[way].extend(taken[way])
        self._check_rest(bench.reach, f"after {case}")
        return CaseSamples(self._link, case, series, ceiling_bytes, ceiling_s)

    def _ask(self, order: object) -> Any:
        """D's answer."""
        self._decode.send(order)
        return self._decode.recv()

    def _names(self, count: int) -> tuple[str, ...]:
        """Ids of ``count`` new requests."""
        self._requests += count
        return tuple(f"request-{self._requests - index}" for index in range(count))

    def _check_rest(self, reach: Reach, where: str) -> None:
        """Check that only D's blocks were written and that P's ring is free. Raises ``WrongBytesError``."""
        raise_if_wrong(self._ask(CheckRest()), where)
        if not reach.ring_is_free:
            raise WrongBytesError(f"{where}: not all spans of P's ring were given back")

    def _bench_for(self, case: Case) -> ForwardBench:
        geometry = UseCache(case.block_bytes, case.layers, case.ranks)
        self._pusher.rest()
        if self._bench is None or self._geometry != geometry:
            if self._bench is not None:
                self._bench.reach.close()
            self._geometry = geometry
            self._ask(geometry)
            self._bench = ForwardBench(self._end, Reach(self._end, self._other, *astuple(geometry)), self._pusher)
        return self._bench

    def _sample(
        self, bench: ForwardBench, way: str, case: Case, draws: Sequence[Draw], prompts: Prompts, series: Series
    ) -> None:
        """One forward, with its push; ``way`` OFF has none."""
        self._turn += 1
        lane = bench.lanes[PushMode.AUTO if way == OFF else way]
        names = () if way == OFF else self._names(len(draws))
        lane.meter.forget()
        lane.pair.expects(names)
        self._pusher.serve(lane)
        for name, each in zip(names, draws, strict=bool(names)):
            self._ask(RegisterBlocks(name, each.targets))
        if names and not lane.pair.all_known.wait(LAND_TIMEOUT_S):
            raise PushError(f"{way}, {case}: D's registrations did not arrive")
        cpu_s, writer_queued = self._pusher.cpu_s, self._pusher.queued_s()
        queued_before = queued_s()
        used, start = time.thread_time(), time.perf_counter()
        computed = self._forward(lane, names, case, draws, prompts, series)
        series.forward_s.append(time.perf_counter() - start)
        series.forward_cpu_s.append(time.thread_time() - used)
        queued_after = queued_s()
        if queued_before is not None and queued_after is not None:
            series.forward_queued_s.append(queued_after - queued_before)
        if names:
            self._await(lane, f"{way}, {case}", LAND_TIMEOUT_S + case.bytes / SLOWEST)
            self._pusher.rest()
            series.writer_s.append(self._pusher.cpu_s - cpu_s)
            if writer_queued is not None:
                series.writer_queued_s.append((self._pusher.queued_s() or 0.0) - writer_queued)
            ready = self._account(lane, series, start, computed)
            checked: Checked = self._ask(Check(self._turn, names))
            raise_if_wrong(checked.problem, f"{way}, {case}")
            series.handed_over_s.append(checked.completed_at - ready)
            series.verified.append(checked.verified)

    def _forward(
        self,
        lane: Lane,
        names: tuple[str, ...],
        case: Case,
        draws: Sequence[Draw],
        prompts: Prompts,
        series: Series,
    ) -> float:
        """As an engine's main thread: arm, compute layer by layer with a hook in each, sweep; then finish. An engine
        that pushes whole requests plans nothing. Returns when the device had computed the last layer's KV.
        """
        events, products, turn = lane.step_events, self._products, self._turn
        layers = [layer.name for layer in lane.layout.layers]
        planned = names if lane.streams else ()
        progress = [PromptProgress(name, (BLOCK_TOKENS,)) for name in planned]
        tables = [[draw.sources] for draw in draws]
        clock, done = time.perf_counter, 0
        last = Mark(self._end.device)
        for scheduled in case.steps:
            chunks = [
                each.advance(done, scheduled, case.tokens, table)
                for each, table in zip(progress, tables, strict=bool(progress))
            ]
            first, done = done // BLOCK_TOKENS, done + scheduled
            places = prompts.place(first, -(-done // BLOCK_TOKENS))
            plan = StepPlan(tuple(chunk for chunk in chunks if chunk is not None))
            events.arm(plan)
            for index, layer in enumerate(layers):
                prompts.store(turn, index, places)
                products.attention()
                before = clock()
                events.layer_saved(layer)
                series.hooks_us.append(1e6 * (clock() - before))
                last = Mark(self._end.device)
                products.mlp()
            settle(self._end.device)
            events.sweep()
        for name, draw in zip(names, draws, strict=bool(names)):
            events.finish(name, (list(draw.sources),))
        return last.reached()

    def _account(self, lane: Lane, series: Series, start: float, computed: float) -> float:
        """Add a push to ``series``. ``computed``: when the last layer was. Returns when it was ready."""
        meter = lane.meter
        ready = max(push.t_last_ready or computed for push in meter.pushes)
        landed = [write.t_landed for write in meter.records if write.t_landed is not None]
        series.end_s.append(max(landed) - start)
        series.exposed_s.append(max(landed) - ready)
        series.writes.append(len(meter.records))
        series.descriptors.append(sum(write.descriptors for write in meter.records))
        series.plans.append(meter.plans)
        return ready

    def _await(self, lane: Lane, where: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not lane.pair.all_over.wait(1.0):
            if self._pusher.failure is not None:
                raise PushError(f"{where}: the writer thread has died") from self._pusher.failure
            if time.monotonic() > deadline:
                raise PushError(f"{where}: the push did not end within {seconds:.0f} s")
        if lane.pair.problems:
            raise PushError(f"{where}: {'; '.join(lane.pair.problems)}")

    def _ceiling(self, size: int) -> float:
        """Seconds of one WRITE of one descriptor, from ring to ring, while P and D do nothing else."""
        self._pusher.rest()
        end = self._end
        end.ring[:size].copy_(self._noise.bytes[:size])
        settle(end.device)
        with as_the_writer(self._settings):
            self._write_one(min(RUN_UP_BYTES, size))
            took = self._write_one(size)
        raise_if_wrong(self._ask(CheckCeiling(size)), "the wire's ceiling")
        return took

    def _write_one(self, size: int) -> float:
        """Seconds until one descriptor of ``size`` bytes has landed."""
        end, other = self._end, self._other
        ours = end.descriptors(OWN, end.ring.data_ptr(), size, size, end.device_id)
        theirs = end.descriptors(DECODE, other.ring, size, size, other.device_id)
        first = np.zeros(1, np.int32)
        start = time.perf_counter()
        handle = end.transport.post_write(Route(DECODE, 0, ours, theirs), first, first)
        while end.transport.poll(handle) is not WriteState.LANDED:
            time.sleep(WRITE_POLL_S)
            if time.perf_counter() - start > LAND_TIMEOUT_S:
                raise PushError(f"a WRITE of {size} bytes did not land within {LAND_TIMEOUT_S:.0f} s")
        took = time.perf_counter() - start
        end.transport.release(handle)
        for descriptors in (ours, theirs):
            end.release(descriptors)
        return took


def raise_if_wrong(problem: str | None, where: str) -> None:
    """Raises ``WrongBytesError`` if D found a problem."""
    if problem is not None:
        raise WrongBytesError(f"{where}: {problem}")


def run(command_end: str, decode_end: str) -> None:
    """Answer orders until the command hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    command, decode = Connection(int(command_end)), Connection(int(decode_end))
    try:
        link, settings = command.recv()
        decode.send(settings)
        end = PrefillEnd(link, decode, settings)
        command.send({"ucx_settings": {name: value for name, value in os.environ.items() if name.startswith("UCX_")}})
        while True:
            order = command.recv()
            try:
                command.send(end.obey(order))
            except WrongBytesError as error:
                command.send(error)
    except GONE as error:
        if command.poll(0):  # the command hung up: we are done
            return
        raise RuntimeError("D's process has ended") from error


if __name__ == "__main__":
    run(*sys.argv[1:])
