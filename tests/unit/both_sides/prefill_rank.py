"""One rank of a prefill engine: its memory, the real writer and registrations, and the worker's part between them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from layerpush.core.layout import CacheLayout
from layerpush.core.replica import ALONE, Replica
from layerpush.core.wire import (
    Cancel,
    Decline,
    Heartbeat,
    Message,
    Ping,
    Registration,
    Unregister,
    encode_completion,
)
from layerpush.prefill.claims import Claims
from layerpush.prefill.links import Links
from layerpush.prefill.push import Identity
from layerpush.prefill.push_protocol import ReportFailure, SendFirstToken
from layerpush.prefill.pushes import Pushes
from layerpush.prefill.samples import Sample, Sampler
from layerpush.prefill.step_events import StepEvents
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import WriteRecord, WriteSums
from layerpush.transport.base import DescriptorIds, Route, WriteHandle, WriteState
from layerpush.transport.gather.cost import CopyCost
from layerpush.transport.gather.gatherer import Gatherer
from layerpush.transport.gather.strategy import GatherStrategy
from layerpush.transport.kv_parts import KvParts
from layerpush.transport.link import Link
from layerpush.transport.transfer import Transfer
from layerpush.transport.writes import Writes
from tests.support.fake_transport import Bytes
from tests.unit.both_sides.process import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    HEADS,
    POISON,
    UNKNOWN_S,
    Process,
    kv_layers,
)
from tests.unit.both_sides.rings import MixedStrategy, PrefillStaging
from tests.unit.builders import layout_of, vllm_pairs

if TYPE_CHECKING:
    from tests.unit.both_sides.decode import DecodeEngine
    from tests.unit.both_sides.prefill import PrefillEngine
    from tests.unit.both_sides.world import World


class PrefillRank(Process):
    """Plays vLLM's worker, and gives claims the world's time."""

    def __init__(
        self,
        world: World,
        engine: PrefillEngine,
        rank: int,
        identity: Identity | None = None,
        trace: TraceFile | None = None,
        meter: PushMeter | None = None,
        write_timeout_s: float = math.inf,
    ) -> None:
        super().__init__(world, engine.engine_id, rank, engine.size)
        self.engine, self.pieces = engine, 1 if world.equal_kv else engine.size
        self.piece = BLOCK_BYTES // self.pieces
        self.replica = Replica(rank, engine.size) if world.equal_kv else ALONE
        layout = self.layout = layout_of([0] * world.layers, world.memory_blocks[0], self.piece)
        self.memory = np.full(world.layers * world.memory_blocks[0] * self.piece, POISON, np.uint8)
        self.owned = self.endpoint.describe("kv", self.memory, range(0, self.memory.size, self.piece), self.piece)
        self.owned.give_away(range(len(self.owned.pieces)))
        half = self.piece // 2
        for part in (0, 1):  # the heads of each of D's ranks, if D has two and this rank has them all
            starts = range(part * half, self.memory.size, self.piece)
            self.endpoint.describe(("half", part), self.memory, starts, half, owned_as=self.owned)
        self.still_read: set[tuple[int, str]] = set()
        """Descriptors that were given away under WRITEs, and their old owners. New WRITEs must not read them."""
        self.evictions: list[str] = []
        self.whole: dict[int, tuple[str, Registration]] = {}
        self.capture = StepEvents(layout.index_of, lambda: None, None)
        self.transfer_stats = _TransferStats()
        self.staging = self._staging(layout)
        self.gatherer = Gatherer(self.transport, layout, self.staging, self.piece)
        self.strategy = self._strategy()
        self._post = self.endpoint.post_write
        self.endpoint.post_write = self._posted
        self.acknowledges, self.world_size = not world.fabric.ordered, engine.size
        worker: Any = self
        self.links = _Links(worker, self.connections)
        writes = Writes(self.transport, layout, self.strategy, write_timeout_s)
        draw = random.Random(rank)
        self.writer = Pushes(
            identity or Identity(engine.engine_id, rank),
            world.mode,
            writes,
            self.capture,
            self.links,
            trace or TraceFile(None, engine.engine_id, rank),
            meter or _Plans(world),
            Sampler(self._parts(), [layer.name for layer in layout.layers], world.verify, draw),
        )
        self.writer.max_in_flight = world.max_in_flight
        self.writer.registry = self
        self.claims = Claims(
            self.writer,
            self.connections,
            self.probe,
            self.peer_errors,
            world.base_id,
            lambda: self.capture.steps,
            UNKNOWN_S,
        )

    def _parts(self) -> KvParts:
        """A block has two heads. A rank has one of them, or both."""
        heads = None if self.world.equal_kv else HEADS
        caches = torch.from_numpy(self.memory).view(self.world.layers, -1, HEADS // self.pieces, BLOCK_SIZE, 1)
        return KvParts(kv_layers(caches, heads), self.rank, self.engine.size)

    def _staging(self, layout: CacheLayout) -> PrefillStaging:
        return PrefillStaging(self, layout)

    def _strategy(self) -> GatherStrategy | None:
        packing = self.world.packing
        if packing.plan == "off":
            return None
        if packing.plan != "mixed":
            return GatherStrategy(self.gatherer, packing.plan, CopyCost(1e-4, 1e-9))
        strategy = MixedStrategy(self.gatherer, "gather", CopyCost(1e-4, 1e-9))
        strategy.draw = random.Random(packing.seed)
        return strategy

    def _posted(
        self, route: Route, local: DescriptorIds, remote: DescriptorIds, notification: bytes = b""
    ) -> WriteHandle:
        self.staging.check_post(route.local_descriptors, local.tolist())
        target: DecodeEngine | None = self.world.engine_of(route.agent)
        if target is not None:
            target.check_post(route.agent, route.remote_descriptors, remote.tolist())
        if target is not None and self.world.equal_kv:
            strays = target.blocks_of_others(self.replica, remote.tolist())
            if len(strays) > 1:  # a whole push has a block at least
                self.accuse(f"blocks {sorted(strays)} belong to another rank with equal KV")
        return self._post(route, local, remote, notification)

    # Memory.

    def own(self, blocks: list[int], owner: str) -> None:
        ids = self.descriptor_ids(slice(None), blocks)
        self.owned.hand_to(ids, owner)
        for index, before in self.still_read:
            if index in ids:
                self.owned.share_with([index], before)

    def give_away(self, blocks: list[int], owner: str) -> None:
        """Another request computes in these blocks from now on."""
        for index in self.descriptor_ids(slice(None), blocks):
            self.memory[index * self.piece : (index + 1) * self.piece] = POISON
            self.still_read.add((index, owner))
        self.forget_reads()

    @property
    def reading(self) -> set[int]:
        """Descriptors that WRITEs on the wire, and copies, read from."""
        ids: set[int] = set()
        for write in self.world.fabric.writes:
            moves = write.state is WriteState.PENDING and write.target.alive
            if write.source is self.endpoint and moves and write.route.local_descriptors != "blocks":
                ids.update(write.local.tolist())
        for gather in self.staging.running:
            ids |= gather.blocks
        return ids

    def forget_reads(self) -> None:
        reading, holders = self.reading, self.engine.holders
        for index, owner in [entry for entry in self.still_read if entry[0] not in reading]:
            self.still_read.discard((index, owner))
            if holders.get(index % self.world.memory_blocks[0]) != owner:
                self.owned.give_away([index], owner)

    def descriptor_ids(self, layers: slice, blocks: list[int]) -> list[int]:
        own = self.world.memory_blocks[0]
        return [layer * own + block for layer in range(self.world.layers)[layers] for block in blocks]

    def write_kv(self, layer: int, block: int, kv: Bytes) -> None:
        at = (layer * self.world.memory_blocks[0] + block) * self.piece
        self.memory[at : at + self.piece] = kv[self.rank % self.pieces * self.piece :][: self.piece]

    # A turn.

    def turn(self) -> None:
        self.forget_reads()
        for request_id in self.evictions:
            self.writer.request_ended(request_id)
        self.evictions.clear()
        super().turn()
        self.writer.turn()
        self.connections.tick(self.world.now)
        self.claims.tick(self.world.now)

    def take(self, sender: str, message: Message, payload: bytes) -> None:
        match message:
            case Registration():
                self.claims.on_registration(sender, message, self.world.now)
            case Cancel():
                self.claims.on_cancel(sender, message, self.world.now)
            case Unregister():
                self.claims.on_unregister(sender, message, self.world.now)
            case Decline():
                self.claims.on_decline(message, self.world.now)
            case Ping():
                self.claims.on_ping(sender, message)
            case _:
                assert isinstance(message, Heartbeat)

    def routes(self, engine_id: str) -> tuple[Route, ...]:
        """A route to each rank of a connected decode engine."""
        agents = self.agents_of(engine_id)
        is_split = len(agents) > self.pieces == 1
        return tuple(
            Route(agent, rank, ("half", rank) if is_split else "kv", (self.pieces, self.rank))
            for agent, (_, rank) in agents.items()
        )

    def take_registration(self, request_id: str, _: float) -> Registration | None:
        return self.claims.take_registration(request_id, self.world.now)

    def is_unwanted(self, request_id: str, _: float) -> bool:
        return self.claims.is_unwanted(request_id, self.world.now)

    def refusal(self, registration: Registration) -> str | None:
        return self.claims.refusal(registration)

    def report_failure(self, report: ReportFailure, _: float) -> None:
        self.claims.report_failure(report, self.world.now)

    def send_first_token(self, action: SendFirstToken, _: float) -> None:
        self.claims.send_first_token(action, self.world.now)

    def push_ended(self, request_id: str, failure: str | None, _: float) -> None:
        self.claims.push_ended(request_id, failure, self.world.now)

    # layerpush.compat.push_worker.VllmPushWorker

    def touch_engine(self, engine_id: str) -> None:
        pass

    def mismatch(self, engine_id: str) -> None:
        """The engines fit each other."""

    def counts_blocks_like(self, engine_id: str) -> bool:
        return True

    def has_equal_block_size(self, engine_id: str) -> bool:
        return True

    def check_targets(self, engine_id: str, blocks: Sequence[Sequence[int]]) -> None:
        """Decode engines register blocks that they have."""

    def discover_link(self, engine_id: str) -> Link:
        routes, regions = self.routes(engine_id), (self.world.memory_blocks[1],) * self.world.layers
        is_gathered = self.strategy is not None and len(routes) == 1
        gathered = replace(routes[0], local_descriptors="blocks") if is_gathered else None
        share, replicas = 1 / len(routes), (self.replica,)
        return Link(engine_id, routes, regions, share=share, replicas=replicas, gathered=gathered)

    def push_whole(self, request_id: str, blocks: Any, data: dict[str, Any]) -> None:
        """As vLLM does it: one WRITE to each rank, whose end sends the completion."""
        registration = msgspec.convert(data, Registration)
        pairs = vllm_pairs(blocks[0], registration.local_block_ids[0])
        pairs = [pair for index, pair in enumerate(pairs) if self.replica.owns(index)] or pairs[-1:]
        ours = self.descriptor_ids(slice(None), [source for source, _ in pairs])
        layers, theirs = range(self.world.layers), self.world.memory_blocks[1]
        targets = [layer * theirs + target for layer in layers for _, target in pairs]
        engine_id, now = registration.decode_engine_id, time.perf_counter()
        for route in self.routes(engine_id):
            handle = self.transport.post_write(route, np.asarray(ours, np.int32), np.asarray(targets, np.int32))
            self.whole[id(handle)] = (route.agent, registration)
            record = WriteRecord(route.remote_rank, (0, layers[-1]), (0, 0), len(ours), 0, now, now)
            self.writer.adopt(request_id, Transfer(self.transport, record, handle), engine_id, registration.request_id)

    def whole_write_ended(self, request_id: str, transfer: Transfer, landed: bool) -> None:
        agent, registration = self.whole.pop(id(transfer.handle))
        if landed:
            self.world.whole_pushes.add(registration.key)
            self.world.note_completion(self, registration, agent)
            self.connections.notify(agent, encode_completion(registration.request_id, self.world_size))

    def end_pushes(self, engine_id: str, reason: str) -> bool:
        self.writer.fail_engine(engine_id, reason)
        return engine_id not in self.writer.engines_in_flight

    def report_sent(self, request_id: str) -> None:
        """The main thread reports the request as sent."""
        self.engine.lease_over(request_id, self)

    def assert_idle(self) -> None:
        super().assert_idle()
        assert len(self.writer) == 0
        assert not self.staging.running
        assert len(self.staging.ring) == 0, "a span was not given back"
        assert not self.writer.engines_in_use | self.writer.engines_in_flight
        assert self.claims.pending == 0
        assert not list(self.claims._prompts), "an ended request was not forgotten"
        assert not any([self.claims.peers._held, self.connections._closing, self.evictions])


class _TransferStats:
    """Pushes by layer, as vLLM's statistics have them; None: a failed one."""

    def __init__(self) -> None:
        self.pushes: list[tuple[WriteSums, float] | None] = []

    def pushed(self, written: WriteSums, transfer_s: float) -> None:
        self.pushes.append((written, transfer_s))

    def failed(self) -> None:
        self.pushes.append(None)


class _Links(Links):
    """Notes completions, for the world."""

    worker: PrefillRank

    def complete(self, link: Link, registration: Registration, sample: Sample | None = None) -> None:
        for route in link.routes:
            self.worker.world.note_completion(self.worker, registration, route.agent)
        super().complete(link, registration, sample)


class _Plans(PushMeter):
    """Counts landed WRITEs by plan, for the world."""

    def __init__(self, world: World) -> None:
        super().__init__(Recorder())
        self._world = world

    def landed(self, write: WriteRecord, plan: str = "direct", *, whole: bool = False) -> None:
        super().landed(write, plan, whole=whole)
        self._world.plans["whole" if whole else plan] += 1
