"""P's process: measures one point after the other.

A script. Arguments: file descriptors of its ends of two socket pairs, with the command and with D.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import asdict, replace
from itertools import permutations
from multiprocessing.connection import Connection

from bench.pair.end import End, digest_of, fill_with_noise, settle
from bench.pair.meeting import PrefillSide, run_prefill
from bench.pair.orders import Expect, Forget, Introduction, Poison
from bench.pair.reach import DECODE, Reach
from bench.pair.settings import POISON, Settings
from bench.pair.tables import Draw
from bench.push.cells import AUTO, FIXED, WAYS, Cell, Series
from bench.push.orders import Check, Measure
from bench.push.points import Point, draw
from layerpush.core.push_protocol import Segment, Write
from layerpush.core.wire import Unpacked, read
from layerpush.prefill.writer import WRITE_POLL_S
from layerpush.transport.base import WriteState
from layerpush.transport.link import DirectPlanner
from layerpush.transport.packing.cost_model import Plan
from layerpush.transport.packing.packer import PushWindow, StagedWrite
from layerpush.transport.packing.runs import transfer_size
from layerpush.transport.writes import Transfer, Writes

DRAWS = 2
"""Choices of blocks for the rounds of a point. Every plan warms up with each of them."""
LAND_TIMEOUT_S = 20.0


class Plans:
    """`Writes` for each plan of one geometry."""

    def __init__(self, end: End, decode: Introduction, block_bytes: int, layers: int, pause: float) -> None:
        self.reach = Reach(end, decode, block_bytes, layers)
        self.cache, self.link = self.reach.cache, self.reach.link
        layout = self.cache.layout
        self.strategy = self.reach.strategy("auto")
        self.writes = {
            "direct": Writes(end.transport, layout),
            "gathered": Writes(end.transport, layout, self.reach.strategy("gather")),
            "packed": Writes(end.transport, layout, self.reach.strategy("packed")),
            AUTO: Writes(end.transport, layout, self.strategy),
        }
        self.reach.calibrate(self.strategy, pause)


class PrefillEnd(PrefillSide):
    def __init__(self, link: str, decode: Connection, settings: Settings) -> None:
        super().__init__(link, decode, settings)
        self._settings = settings
        self._pause = WRITE_POLL_S if settings.polls == "engine" else 0.0
        fill_with_noise(self._end.memory, settings.seed)
        self._other = self._meet(digest_of(self._end.memory))
        self._plans: Plans | None = None
        self._writes = 0
        self._orders = list(permutations(WAYS))  # the plan before a WRITE affects its time, so the order changes
        random.Random(settings.seed).shuffle(self._orders)

    def obey(self, order: Measure) -> Cell:
        """Raises ``WrongBytesError`` when a byte is not where it must be."""
        point = order.point
        plans = self._plans_for(point)
        draws = [draw(point, plans.cache.blocks, self._settings.seed, number) for number in range(DRAWS)]
        windows = [self._expect(plans, each) for each in draws]
        ways = {way: Series() for way in WAYS}
        for turn in range(-DRAWS, order.rounds):
            chosen, window = draws[turn % DRAWS], windows[turn % DRAWS]
            for way in self._orders[turn % len(self._orders)]:
                sample = self._sample(plans, way, point, chosen, window)
                if turn >= 0:
                    series = ways[way]
                    for values, value in zip((series.seconds, series.posted_s, series.plans), sample, strict=True):
                        values.append(value)  # type: ignore[attr-defined]
        for window in windows:
            if window is not None:
                self._ask(Forget(window.request_id))
        self._check_rest(plans.cache, f"after {point}")
        pairs = DirectPlanner(plans.cache.layout).descriptors(self._write(point, draws[0]), plans.link)
        transfer = transfer_size(*pairs, point.block_bytes)
        costs = plans.strategy.costs_to(DECODE)
        return Cell(
            self._link,
            point,
            ways,
            {plan: transfer.runs(Plan(plan)) for plan in FIXED},
            {plan: costs.estimate(Plan(plan), transfer) for plan in FIXED},
            asdict(costs),
        )

    def _plans_for(self, point: Point) -> Plans:
        if self._is_new(point.block_bytes, point.layers) or self._plans is None:
            if self._plans is not None:
                self._plans.reach.close()
            self._plans = Plans(self._end, self._other, point.block_bytes, point.layers, self._pause)
        return self._plans

    def _expect(self, plans: Plans, chosen: Draw) -> PushWindow | None:
        (request_id,) = self._names(1)
        return plans.reach.window(self._ask(Expect(request_id, chosen.targets)))

    def _write(self, point: Point, chosen: Draw) -> Write:
        self._writes += 1
        every = slice(0, point.layers)
        part = Segment(every, 0, 0, point.blocks, chosen.sources, chosen.targets)
        return Write(self._writes, 0, 0, point.bytes, (part,))

    def _sample(
        self, plans: Plans, way: str, point: Point, chosen: Draw, window: PushWindow | None
    ) -> tuple[float, float, str]:
        """Seconds from the decision until the WRITE has landed, and until its post, and the taken plan."""
        self._decode.send(Poison())
        self._end.ring.fill_(POISON)
        settle(self._end.device)
        self._decode.recv()
        write, link = self._write(point, chosen), replace(plans.link, window=window)
        start = time.perf_counter()
        (transfer,) = plans.writes[way].post(write, link)
        self._wait_landed(plans, transfer, start)
        plans.writes[way].release(transfer)
        took = time.perf_counter() - start
        self._check(Check(chosen), f"{way}, {point}")
        return took, transfer.record.t_posted - start, transfer.record.plan

    def _wait_landed(self, plans: Plans, transfer: Transfer, start: float) -> None:
        """Poll as a writer does: sleep, read messages, check the WRITE. Raises ``TransportError`` if it is lost."""
        while True:
            time.sleep(self._pause)
            for agent, payload in self._end.transport.notifications():
                message = read(payload)
                if isinstance(message, Unpacked):
                    plans.strategy.unpacked(agent, message.number, message.done)
            if transfer.poll() is WriteState.LANDED:
                return
            if time.perf_counter() - start > LAND_TIMEOUT_S:
                stage = transfer.stage.value if isinstance(transfer, StagedWrite) else "on the wire"
                raise RuntimeError(f"not landed within {LAND_TIMEOUT_S:.0f} s: {stage}")


if __name__ == "__main__":
    run_prefill(PrefillEnd, *sys.argv[1:])
