"""P's process: measures one point after the other.

A script. Arguments: file descriptors of its ends of two socket pairs, with the command and with D.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from bench.push.cells import AUTO, FIXED, WAYS, Cell, Series
from bench.push.decode import digest_of
from bench.push.end import Cache, End, fill_with_noise
from bench.push.orders import (
    Check,
    CheckRest,
    Expect,
    Forget,
    Introduction,
    Measure,
    Poison,
    UseCache,
    WrongBytesError,
)
from bench.push.points import Draw, Point, draw
from bench.push.provenance import about_this_process
from bench.push.settings import POISON, Settings
from layerpush.prefill.costs import Costs, Plan
from layerpush.prefill.outbox import Outbox, PostedWrite
from layerpush.prefill.packer import Packer, PushWindow
from layerpush.prefill.protocol import Segment, Write
from layerpush.prefill.runs import shape_of
from layerpush.prefill.stager import Stager
from layerpush.prefill.staging import DirectPlanner, Link
from layerpush.prefill.writer import WRITE_POLL_S
from layerpush.staging import PIECE_BYTES
from layerpush.transport.base import Route
from layerpush.wire import Unpacked, Window, read

DECODE = "D"
DRAWS = 2
"""Choices of blocks that the rounds of a point go through, each warmed up with every plan."""
LAND_TIMEOUT_S = 20.0
OWN = "NIXL_INIT_AGENT"


class Desk:
    """Everything for one geometry: our cache, the ways into D's cache and ring, and an outbox for each plan."""

    def __init__(self, end: End, decode: Introduction, agent: str, block_bytes: int, layers: int) -> None:
        self._end = end
        self.cache: Cache = end.cache(block_bytes, layers)
        size, device = len(self.cache.slots) * self.cache.blocks * block_bytes, end.device_id
        ring, base = end.ring.numel(), end.ring.data_ptr()
        ours = end.descriptors(OWN, end.memory.data_ptr(), size, block_bytes, device)
        theirs = end.descriptors(agent, decode.memory, size, block_bytes, decode.device_id)
        blocks = end.descriptors(OWN, base, ring, block_bytes, device)
        pieces = end.descriptors(OWN, base, ring, PIECE_BYTES, device)
        their_pieces = end.descriptors(agent, decode.ring, ring, PIECE_BYTES, decode.device_id)
        self._prepared: list[Any] = [ours, theirs, blocks, pieces, their_pieces]
        layout = self.cache.layout
        gathered = Route(agent, 0, blocks, theirs)
        self.link = Link(DECODE, (Route(agent, 0, ours, theirs),), layout.region_blocks, gathered=gathered)
        self.ring = Route(agent, 0, pieces, their_pieces)
        self.packer = Packer(end.transport, layout, self.cache.staging, block_bytes)
        copy_s, byte_s = self.cache.staging.copy_costs()
        prior = Costs(gather_s=byte_s, scatter_s=byte_s, copy_s=copy_s)
        self.stager = Stager(self.packer, layout, "auto", prior)
        self.outboxes = {
            "direct": Outbox(end.transport, layout),
            "gathered": Outbox(end.transport, layout, Stager(self.packer, layout, "gather", prior)),
            "packed": Outbox(end.transport, layout, Stager(self.packer, layout, "packed", prior)),
            AUTO: Outbox(end.transport, layout, self.stager),
        }

    def calibrate(self, pause: float) -> None:
        """As a worker does when a decode engine first offers its ring."""
        self.stager.calibrate(DECODE, self._end.transport, self.ring)
        while self.stager.is_busy:
            self.stager.turn()
            time.sleep(pause)

    def close(self) -> None:
        for descriptors in self._prepared:
            self._end.release(descriptors)


class PrefillEnd:
    def __init__(self, decode: Connection, settings: Settings) -> None:
        self._settings = settings
        self._decode = decode
        self._pause = WRITE_POLL_S if settings.polls == "engine" else 0.0
        decode.send(settings)
        self._end = End("P", settings)
        fill_with_noise(self._end.memory, settings.seed)
        self._other: Introduction = decode.recv()
        end = self._end
        metadata, digest = end.agent.get_agent_metadata(), digest_of(end.memory)
        decode.send(Introduction(metadata, end.memory.data_ptr(), end.ring.data_ptr(), end.device_id, digest))
        end.agent.add_remote_agent(self._other.metadata)
        self._geometry: tuple[int, int] | None = None
        self._desk: Desk | None = None
        self._requests = self._writes = 0

    def measure(self, link: str, point: Point, rounds: int) -> Cell:
        """Raises ``WrongBytesError`` when a byte is not where it must be."""
        desk = self._desk_for(point)
        draws = [draw(point, desk.cache.blocks, self._settings.seed, number) for number in range(DRAWS)]
        windows = [self._expect(desk, each) for each in draws]
        ways = {way: Series() for way in WAYS}
        for turn in range(-DRAWS, rounds):
            chosen, window = draws[turn % DRAWS], windows[turn % DRAWS]
            first = turn % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                sample = self._sample(desk, way, point, chosen, window)
                if turn >= 0:
                    series = ways[way]
                    for values, value in zip((series.seconds, series.posted_s, series.plans), sample, strict=True):
                        values.append(value)  # type: ignore[attr-defined]
        for window in windows:
            if window is not None:
                self._ask(Forget(window.request_id))
        self._raise_if_wrong(self._ask(CheckRest()), f"after {point}")
        if not desk.cache.is_unused:
            raise WrongBytesError(f"after {point}: not all spans of P's ring were given back")
        pairs = DirectPlanner(desk.cache.layout).descriptors(self._write(point, draws[0]), desk.link)
        shape = shape_of(*pairs, point.block_bytes)
        costs = desk.stager.costs_to(DECODE)
        return Cell(
            link,
            point,
            ways,
            {plan: shape.runs(Plan(plan)) for plan in FIXED},
            {plan: costs.estimate(Plan(plan), shape) for plan in FIXED},
            asdict(costs),
        )

    def _desk_for(self, point: Point) -> Desk:
        if self._desk is None or self._geometry != (point.block_bytes, point.layers):
            if self._desk is not None:
                self._desk.close()
            self._geometry = (point.block_bytes, point.layers)
            self._ask(UseCache(*self._geometry))
            self._desk = Desk(self._end, self._other, DECODE, *self._geometry)
            self._desk.calibrate(self._pause)
        return self._desk

    def _expect(self, desk: Desk, chosen: Draw) -> PushWindow | None:
        self._requests += 1
        request_id = f"request-{self._requests}"
        offer: Window | None = self._ask(Expect(request_id, chosen.targets))
        return None if offer is None else PushWindow(offer, desk.ring, request_id)

    def _write(self, point: Point, chosen: Draw) -> Write:
        self._writes += 1
        every = slice(0, point.layers)
        part = Segment(every, 0, 0, point.blocks, chosen.sources, chosen.targets)
        return Write(self._writes, 0, 0, point.bytes, (part,))

    def _sample(
        self, desk: Desk, way: str, point: Point, chosen: Draw, window: PushWindow | None
    ) -> tuple[float, float, str]:
        """Seconds from the decision until all has landed, and until it was posted, and the plan that was taken."""
        self._decode.send(Poison())
        self._end.ring.fill_(POISON)
        self._decode.recv()
        write, outbox = self._write(point, chosen), desk.outboxes[way]
        start = time.perf_counter()
        posted = outbox.post(write, desk.link, window)
        records = [part.record for part in posted.parts]
        self._land(desk, outbox, posted, start)
        took = time.perf_counter() - start
        if posted.lost is not None:
            raise RuntimeError(f"{way}, {point}: {posted.lost}")
        self._raise_if_wrong(self._ask(Check(chosen)), f"{way}, {point}")
        return took, records[0].t_posted - start, records[0].plan

    def _land(self, desk: Desk, outbox: Outbox, posted: PostedWrite, start: float) -> None:
        """As a writer's turns do: it sleeps, takes what has arrived, looks at its WRITEs."""
        while True:
            time.sleep(self._pause)
            for agent, payload in self._end.transport.notifications():
                message = read(payload)
                if isinstance(message, Unpacked):
                    desk.stager.unpacked(agent, message.number, message.done)
            if outbox.poll(posted):
                return
            if time.perf_counter() - start > LAND_TIMEOUT_S:
                stages = [part.staged.stage.value if part.staged else "on the wire" for part in posted.parts]
                raise RuntimeError(f"not landed within {LAND_TIMEOUT_S:.0f} s: {stages}")

    def _ask(self, order: object) -> Any:
        self._decode.send(order)
        return self._decode.recv()

    def _raise_if_wrong(self, problem: str | None, where: str) -> None:
        if problem is not None:
            raise WrongBytesError(f"{where}: {problem}")


def main(command_descriptor: int, decode_descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    command, decode = Connection(command_descriptor), Connection(decode_descriptor)
    try:
        link, settings = command.recv()
        end = PrefillEnd(decode, settings)
        command.send(about_this_process())
        while True:
            order = command.recv()
            assert isinstance(order, Measure)
            try:
                command.send(end.measure(link, order.point, order.rounds))
            except WrongBytesError as error:
                command.send(error)
    except (EOFError, ConnectionResetError, BrokenPipeError) as error:
        if command.poll(0):  # the command hung up: we are done
            return
        raise RuntimeError("D's process has ended") from error


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
