"""One prefill rank whose scheduler does what a test says. Its decode engines only keep the bytes and messages they get.

The rank is the one of the world: real pushes, claims and links, over the fake network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from layerpush.core.layout import CacheLayout
from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import ChunkPlan, PromptProgress, StepPlan
from layerpush.core.wire import Cancel, Registration
from layerpush.prefill.push import Identity
from layerpush.prefill.push_protocol import ReportFailure
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import PushRecord
from layerpush.transport.base import Route, WriteState
from layerpush.transport.gather.cost import CopyCost
from layerpush.transport.gather.strategy import GatherStrategy
from layerpush.transport.transfer import Transfer
from tests.support.fake_transport import Bytes, Faults
from tests.support.totals import Totals
from tests.unit.both_sides.prefill import LEASE_S, PrefillEngine, Request
from tests.unit.both_sides.prefill_rank import PrefillRank
from tests.unit.both_sides.process import BLOCK_BYTES, BLOCK_SIZE, POISON, Prompt
from tests.unit.both_sides.rings import Packing, PrefillStaging
from tests.unit.both_sides.world import World
from tests.unit.builders import registration


class KeptRecords(TraceFile):
    """A trace that a test can read."""

    def __init__(self) -> None:
        super().__init__(None, "P", 0)
        self.records: list[PushRecord] = []

    @property
    def enabled(self) -> bool:
        return True

    def write_record(self, record: PushRecord) -> None:
        self.records.append(record)


class ScriptedRequest(Request):
    """A request and its block table. ``provisional``: P's scheduler may take its steps back."""

    def __init__(
        self,
        name: str,
        tokens: int,
        table: list[int],
        mode: PushMode | None = None,
        whole: bool = False,
        provisional: bool = False,
    ) -> None:
        super().__init__(Prompt(name, name, tokens), name, table)
        self.progress = PromptProgress(name, (BLOCK_SIZE,), whole, mode, provisional=provisional)

    @property
    def name(self) -> str:
        return self.request_id

    @property
    def blocks(self) -> list[int]:
        assert self.table is not None
        return self.table[: self.prompt.blocks]

    def chunk(self, tokens: int) -> ChunkPlan:
        plan = self.progress.advance(self.computed, tokens, self.prompt.tokens, [self.table or []])
        assert plan is not None
        self.computed = plan.end
        return plan

    def cached(self, tokens: int) -> ChunkPlan:
        """Its first tokens are in P's prefix cache."""
        assert self.table is not None
        plan = self.progress.plan_cached(tokens, self.prompt.tokens, [self.table])
        assert plan is not None
        self.computed = tokens
        return plan


class ScriptedDecoder:
    """A decode engine of one or more ranks that split every block by heads."""

    def __init__(self, world: ScriptedWorld, name: str, ranks: int) -> None:
        self.name, self.piece, self.frozen = name, BLOCK_BYTES // ranks, False
        self._layers, self._blocks = world.layers, world.memory_blocks[1]
        size = self._layers * self._blocks * self.piece
        self.memories = [np.full(size, POISON, np.uint8) for _ in range(ranks)]
        self.ends = [world.fabric.endpoint(f"{name}-{rank}") for rank in range(ranks)]
        self.processes = self.ends
        for rank, (end, memory) in enumerate(zip(self.ends, self.memories, strict=True)):
            end.describe("kv", memory, range(0, size, self.piece), self.piece)
            ours = world.rank.memory
            world.p.describe((ranks, rank), ours, range(rank * self.piece, ours.size, BLOCK_BYTES), self.piece)

    def block(self, layer: int, block: int) -> Bytes:
        """One block put together from all ranks."""
        at = (layer * self._blocks + block) * self.piece
        return np.concatenate([memory[at : at + self.piece] for memory in self.memories])

    def holds(self, request: Request, wanted: Registration) -> bool:
        """Whether every block that was asked for has the prompt's KV."""
        (targets,) = wanted.local_block_ids
        return all(
            np.array_equal(self.block(layer, target), request.prompt.kv(layer, index))
            for layer in range(self._layers)
            for index, target in enumerate(targets, request.prompt.blocks - len(targets))
        )

    def untouched(self, but: Iterable[int] = ()) -> bool:
        spared = set(but)
        blocks = [block for block in range(self._blocks) if block not in spared]
        return all((self.block(layer, block) == POISON).all() for layer in range(self._layers) for block in blocks)

    def received(self) -> list[list[bytes]]:
        """The notifications that each rank has got since the last look."""
        return [[payload for _, payload in end.notifications()] for end in self.ends]

    def hand_out(self, wanted: Registration, owner: str) -> None:
        """These blocks are for a request of P."""
        for end in self.ends:
            end.descriptors["kv"].hand_to(self._ids(wanted), owner)

    def reuse(self, wanted: Registration) -> None:
        """These blocks are the engine's own from now on, and a WRITE into them is a violation."""
        for end in self.ends:
            end.descriptors["kv"].give_away(self._ids(wanted))

    def is_written(self, wanted: Registration) -> bool:
        """Whether a WRITE into these blocks is on the wire."""
        ids = set(self._ids(wanted))
        return any(
            write.state is WriteState.PENDING and write.target is end and ids & set(write.remote.tolist())
            for end in self.ends
            for write in end.fabric.writes
            if end.alive
        )

    def check_post(self, *_: object) -> None:
        """The memory's owners are checked by the network."""

    def _ids(self, wanted: Registration) -> list[int]:
        return [layer * self._blocks + block for layer in range(self._layers) for block in wanted.local_block_ids[0]]


class ScriptedStaging(PrefillStaging):
    """``fates`` of the next copies: None succeeds, "refused" and "broken" fail."""

    def __init__(self, rank: PrefillRank, layout: CacheLayout) -> None:
        super().__init__(rank, layout)
        self.fates: list[str | None] = []

    def _fate(self) -> str | None:
        return self.fates.pop(0) if self.fates else None


class ScriptedRank(PrefillRank):
    """Keeps what the writer reports."""

    world: ScriptedWorld
    staging: ScriptedStaging

    def __init__(self, *args: Any, **details: Any) -> None:
        self.failures: list[ReportFailure] = []
        self.endings: dict[str, list[str | None]] = {}
        self.released: list[str] = []
        self.whole_writes_ended: list[tuple[str, bool]] = []
        self.disconnected: list[str] = []
        super().__init__(*args, **details)

    def _staging(self, layout: CacheLayout) -> PrefillStaging:
        return ScriptedStaging(self, layout)

    def _strategy(self) -> GatherStrategy | None:
        plan = self.world.packing.plan
        return None if plan == "off" else GatherStrategy(self.gatherer, plan, CopyCost(1e-9, 0.0))

    def routes(self, engine_id: str) -> tuple[Route, ...]:
        agents = list(self.agents_of(engine_id))
        if len(agents) == 1:
            return (Route(agents[0], 0, "kv", "kv"),)
        return tuple(Route(agent, rank, (len(agents), rank), "kv") for rank, agent in enumerate(agents))

    def disconnect(self, engine_id: str) -> None:
        super().disconnect(engine_id)
        self.disconnected.append(engine_id)

    def report_failure(self, report: ReportFailure, now: float) -> None:
        """A decode engine with a drained failure uses its blocks for other requests at once."""
        self.failures.append(report)
        decoder, wanted = self.world.side(report.registration.decode_engine_id), report.registration
        if report.drained:
            if not all(end.alive for end in decoder.ends) and self.connections.closing(decoder.name) is None:
                self.accuse(f"said to have drained before the connection is known to be lost: {report}")
            if decoder.is_written(wanted):
                self.accuse(f"said to have drained with a WRITE on the wire: {report}")
            if sum(one.drained and one.registration == wanted for one in self.failures) > 1:
                self.accuse(f"drained twice: {report}")
            decoder.reuse(wanted)
        super().report_failure(report, now)

    def push_ended(self, request_id: str, failure: str | None, now: float) -> None:
        self.endings.setdefault(request_id, []).append(failure)
        super().push_ended(request_id, failure, now)

    def report_sent(self, request_id: str) -> None:
        self.released.append(request_id)
        super().report_sent(request_id)

    def whole_write_ended(self, request_id: str, transfer: Transfer, landed: bool) -> None:
        self.whole_writes_ended.append((request_id, landed))
        super().whole_write_ended(request_id, transfer, landed)


class ScriptedPrefill(PrefillEngine):
    def __init__(self, world: ScriptedWorld, details: dict[str, Any]) -> None:
        self._details = details
        super().__init__(world, "P", 1)

    def _rank(self, number: int) -> PrefillRank:
        return ScriptedRank(self.world, self, number, **self._details)

    def hold(self, request: Request) -> None:
        """The request has its blocks."""
        assert request.table is not None
        self.requests[request.request_id] = request
        self.ranks[0].own(request.table, request.prompt.text)

    def drop(self, request: Request) -> None:
        if self.requests.pop(request.request_id, None) is not None:
            self._give_away(request)

    def _give_away(self, request: Request, *, read: bool = False) -> None:
        """Its blocks are another request's from now on."""
        blocks, request.table = request.table, None
        if blocks is not None:
            self.ranks[0].give_away(blocks, request.prompt.text)


class ScriptedWorld(World):
    """``plan``: how P's WRITEs go. Gathered ones use a ring of ``ring_blocks`` blocks."""

    memory_blocks = 64, 48

    def __init__(
        self,
        faults: Faults | None = None,
        layers: int = 3,
        mode: PushMode = PushMode.LAYER,
        write_timeout_s: float = math.inf,
        meter: PushMeter | None = None,
        engine: Identity | None = None,
        plan: Literal["off", "auto", "gather"] = "off",
        ring_blocks: int = 4096,
    ) -> None:
        self.layers = layers
        self.trace, meter = KeptRecords(), meter or PushMeter(Recorder())
        self.totals = Totals(meter)
        self._rank_details = {
            "identity": engine,
            "trace": self.trace,
            "meter": meter,
            "write_timeout_s": write_timeout_s,
        }
        super().__init__(faults, mode=mode, packing=Packing(plan, ring_blocks))
        self.close()  # a test reads the log itself
        self.p, self.writer, self.capture = self.rank.endpoint, self.rank.writer, self.rank.capture

    @staticmethod
    def base_id(request_id: str) -> str:
        return request_id.removeprefix("d-")

    def start(self, engine_id: str) -> None:
        if engine_id == "P":
            self.engines["P"] = ScriptedPrefill(self, self._rank_details)

    @property
    def engine(self) -> ScriptedPrefill:
        engine = self.engines["P"]
        assert isinstance(engine, ScriptedPrefill)
        return engine

    @property
    def rank(self) -> ScriptedRank:
        (rank,) = self.engine.ranks
        assert isinstance(rank, ScriptedRank)
        return rank

    # Decode engines.

    def decoder(self, name: str = "D", ranks: int = 1, *, connected: bool = True) -> ScriptedDecoder:
        """A new decode engine. ``connected``: P need not begin a handshake. A ``frozen`` one answers no handshake."""
        engine = ScriptedDecoder(self, name, ranks)
        self.engines[name] = engine
        if connected:
            self.rank.connected[name] = tuple(end.name for end in engine.ends)
        return engine

    @property
    def d(self) -> ScriptedDecoder:
        """Decode engine D."""
        return self.side("D")

    def side(self, engine_id: str) -> ScriptedDecoder:
        """A decode engine."""
        engine: Any = self.engines[engine_id]
        return engine

    def asks(
        self,
        request: ScriptedRequest,
        decoder: ScriptedDecoder,
        first: int = 10,
        wanted: int | None = None,
        number: int = 0,
    ) -> Registration:
        """A registration of the prompt's last ``wanted`` blocks, into D's blocks from ``first`` on; not yet sent. D is
        a stock engine: it gets no answers, but with a ``number`` it hears which chunks have landed.
        """
        count = request.prompt.blocks if wanted is None else wanted
        names: dict[str, Any] = {"request_id": f"d-{request.name}", "engine": decoder.name, "prefill": request.name}
        made = registration(range(first, first + count), **names, number=number)
        decoder.hand_out(made, request.prompt.text)
        return made

    def send(self, wanted: Registration) -> None:
        """A registration arrives."""
        self.rank.claims.on_registration(self.side(wanted.decode_engine_id).ends[0].name, wanted, self.now)

    def registers(
        self, request: ScriptedRequest, decoder: ScriptedDecoder | None = None, **details: int
    ) -> Registration:
        """A decode engine, D by default, registers the prompt before it begins. See ``asks``."""
        if decoder is None:
            decoder = self.d if "D" in self.engines else self.decoder()
        self.send(wanted := self.asks(request, decoder, **details))
        return wanted

    def cancel(self, wanted: Registration) -> None:
        """D's message arrives."""
        address = wanted.decode_engine_id, wanted.decode_host, wanted.decode_port, wanted.decode_tp_size
        self.rank.claims.on_cancel(
            self.side(wanted.decode_engine_id).ends[0].name, Cancel(wanted.request_id, *address), self.now
        )

    def assert_delivered(self, request: ScriptedRequest, wanted: Registration) -> None:
        """The decode engine has every byte, and each of its ranks got one completion since the last look."""
        decoder = self.side(wanted.decode_engine_id)
        assert decoder.received() == [[f"d-{request.name}:1".encode()] for _ in decoder.memories]
        assert decoder.holds(request, wanted)

    def reported_failures(self, name: str = "p-1") -> list[tuple[str, bool, bool]]:
        """``(reason, drained, cancelled)`` of each failure that was reported about a request."""
        return [
            (one.reason, one.drained, one.cancelled)
            for one in self.rank.failures
            if one.registration.request_id == f"d-{name}"
        ]

    # The scheduler and the forward pass.

    def turn(self) -> None:
        self.rank.turn()

    def step(
        self,
        *work: tuple[ScriptedRequest, int],
        cached: Sequence[tuple[ScriptedRequest, int]] = (),
        hooked: Sequence[int] | None = None,
        between: Callable[[], object] | None = None,
    ) -> None:
        """One engine step of ``(request, tokens)``; the writer gets a turn after every layer.

        ``cached``: requests, and how many of their tokens were computed before.
        """
        for request, _ in (*work, *cached):
            self.engine.hold(request)
        found = [(request, request.cached(tokens)) for request, tokens in cached]
        for request, chunk in found:
            self.compute(request, chunk)
        chunks = [(request, request.chunk(tokens)) for request, tokens in work]
        plans = tuple(chunk for _, chunk in found + chunks)
        self.capture.arm(StepPlan(plans))
        self.rank.turn()
        for layer in range(self.layers):
            for request, chunk in chunks:
                self._compute(request, chunk, layer)
            if hooked is None or layer in hooked:
                self.capture.layer_saved(f"layers.{layer}")
                self.rank.turn()
            if between is not None:
                between()
        self.capture.sweep()
        self.rank.turn()

    def arm(self, request: ScriptedRequest, tokens: int, aborted: Sequence[str] = (), **details: Any) -> None:
        """A step begins. All of it is computed at once, and no layer is reported yet."""
        self.engine.hold(request)
        chunk = request.chunk(tokens)
        self.capture.arm(StepPlan((chunk,), **details), aborted)
        self.compute(request, chunk)

    def finish(self, request: ScriptedRequest) -> None:
        """The scheduler has finished the request, and the writer knows it."""
        self.end(request)
        self.rank.turn()

    def end(self, request: ScriptedRequest) -> None:
        """The scheduler has finished the request."""
        self.engine.hold(request)
        request.leased_until = self.now + LEASE_S
        self.capture.finish(request.name, (request.blocks,))

    def accept(self, request: ScriptedRequest) -> None:
        """The scheduler has processed the request's last step; the writer knows it."""
        self.capture.arm(StepPlan(accepted=(request.name,)))
        self.rank.turn()

    def abort(self, request: ScriptedRequest) -> None:
        """The scheduler has dropped the request and given its blocks away; the writer may not know it yet."""
        self.capture.arm(StepPlan(), [request.name])
        self.engine.drop(request)

    def preempt(self, request: ScriptedRequest, table: list[int]) -> None:
        """The request loses its blocks, and will get others; the next step must name it."""
        self.engine.drop(request)
        request.progress.restart()
        request.computed, request.table = 0, table

    def expire(self, request: ScriptedRequest) -> None:
        """The request's lease ends."""
        self.capture.expire(request.name)

    def settle(self, turns: int = 60) -> None:
        """Let the wire run empty."""
        for _ in range(turns):
            self.turn()

    def compute(self, request: ScriptedRequest, chunk: ChunkPlan) -> None:
        """Fill the chunk's blocks of all layers."""
        for layer in range(self.layers):
            self._compute(request, chunk, layer)

    def _compute(self, request: ScriptedRequest, chunk: ChunkPlan, layer: int) -> None:
        part = chunk.groups[0]
        for index, block in enumerate(part.blocks, part.first):
            self.rank.write_kv(layer, block, request.prompt.kv(layer, index))

    @property
    def sleep_s(self) -> float | None:
        """The writer's longest sleep, in seconds; None: until it is woken."""
        now = time.perf_counter()
        due = self.writer.next_due(now)
        return None if due is None else round(due - now, 9)

    def assert_clean(self) -> None:
        """No push in the table, no handle kept, no span of the ring, no stray WRITE, even after all have landed."""
        self.fabric.settle()
        assert self.wrongs == []
        assert len(self.writer) == 0
        assert not self.p._live
        assert not [write for write in self.p._released if write.target.alive], "released while it could still land"
        assert self.fabric.violations == []
        assert not self.writer.engines_in_use
        assert not self.writer.engines_in_flight
        assert len(self.rank.staging.ring) == 0
