"""A prefill rank's writer on a fake network: real bytes on both sides, a forward pass played layer by layer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import ChunkPlan, PromptProgress, StepPlan
from layerpush.core.wire import Registration
from layerpush.prefill.push import BlockIds, Identity
from layerpush.prefill.push_protocol import ReportFailure, SendFirstToken
from layerpush.prefill.pushes import Pushes
from layerpush.prefill.step_events import StepEvents
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import PushRecord, WriteRecord, WriteSums
from layerpush.transport.base import Route, WriteState
from layerpush.transport.connections import Then
from layerpush.transport.gather.strategy import GatherStrategy
from layerpush.transport.link import Link
from layerpush.transport.transfer import Transfer
from layerpush.transport.writes import Writes
from tests.support.fake_transport import Bytes, FakeFabric, FakeTransport, Faults
from tests.support.totals import Totals
from tests.unit.builders import blocks_of, layout_of, registration, upstream_pairs

BLOCK_BYTES, BLOCK_SIZE, P_BLOCKS, D_BLOCKS = 16, 4, 64, 48
POISON = 0xEE


class KeptRecords(TraceFile):
    """A trace that a test can read."""

    def __init__(self) -> None:
        super().__init__(None, "P", 0)
        self.records: list[PushRecord] = []

    @property
    def enabled(self) -> bool:
        return True

    def add(self, record: PushRecord) -> None:
        self.records.append(record)


@dataclass
class Prompt:
    """One request: its block table on P and its progress in P's scheduler."""

    name: str
    tokens: int
    table: list[int]
    mode: PushMode | None = None
    whole: bool = False
    provisional: bool = False
    """P's scheduler may take its steps back."""
    progress: PromptProgress = field(init=False)
    computed: int = 0

    def __post_init__(self) -> None:
        self.progress = PromptProgress(self.name, (BLOCK_SIZE,), self.whole, self.mode, provisional=self.provisional)

    @property
    def blocks(self) -> list[int]:
        return self.table[: blocks_of(self.tokens, BLOCK_SIZE)]

    def chunk(self, tokens: int) -> ChunkPlan:
        plan = self.progress.advance(self.computed, tokens, self.tokens, [self.table])
        assert plan is not None
        self.computed = plan.end
        return plan

    def cached(self, tokens: int) -> ChunkPlan:
        """Its first tokens are in P's prefix cache."""
        plan = self.progress.plan_cached(tokens, self.tokens, [self.table])
        assert plan is not None
        self.computed = tokens
        return plan

    def preempted(self, table: list[int]) -> None:
        self.progress.restart()
        self.computed, self.table = 0, table

    def kv(self, layer: int, index: int) -> Bytes:
        """The KV that attention leaves in a block. It depends on the tokens only, so it is equal in every epoch."""
        seed = [*self.name.encode(), layer, index]
        return np.random.default_rng(seed).integers(0, POISON, BLOCK_BYTES, dtype=np.uint8)


class Decoder:
    """A decode engine of one or more ranks that split every block by heads."""

    def __init__(self, rig: Rig, name: str, ranks: int) -> None:
        self.name, self.piece = name, BLOCK_BYTES // ranks
        layers = len(rig.layout.layers)
        offsets = range(0, layers * D_BLOCKS * self.piece, self.piece)
        self.memories = [np.full(layers * D_BLOCKS * self.piece, POISON, np.uint8) for _ in range(ranks)]
        self.ends: list[FakeTransport] = []
        for rank, memory in enumerate(self.memories):
            self.ends.append(rig.fabric.endpoint(f"{name}-{rank}"))
            self.ends[-1].describe("kv", memory, offsets, self.piece)
            starts = range(rank * self.piece, rig.p_memory.size, BLOCK_BYTES)
            rig.p.describe(f"{ranks}-{rank}", rig.p_memory, starts, self.piece)
        routes = tuple(Route(f"{name}-{rank}", rank, f"{ranks}-{rank}", "kv") for rank in range(ranks))
        self.link = Link(name, routes, (D_BLOCKS,) * layers, share=1 / ranks)

    def block(self, layer: int, block: int) -> Bytes:
        """One block put together from all ranks."""
        at = (layer * D_BLOCKS + block) * self.piece
        return np.concatenate([memory[at : at + self.piece] for memory in self.memories])

    def holds(self, prompt: Prompt, wanted: Registration, layers: int) -> bool:
        """Whether every block that was asked for has the prompt's KV."""
        indices = {block: index for index, block in enumerate(prompt.blocks)}
        pairs = upstream_pairs(prompt.blocks, wanted.local_block_ids[0])
        return all(
            np.array_equal(self.block(layer, target), prompt.kv(layer, indices[source]))
            for layer in range(layers)
            for source, target in pairs
        )

    def untouched(self, layers: int, but: Iterable[int] = ()) -> bool:
        spared = set(but)
        return all(
            (self.block(layer, block) == POISON).all()
            for layer in range(layers)
            for block in range(D_BLOCKS)
            if block not in spared
        )

    def told(self) -> list[list[bytes]]:
        """The notifications that each rank has got since the last look."""
        return [[payload for _, payload in end.notifications()] for end in self.ends]

    def reuse(self, wanted: Registration) -> None:
        """These blocks are the engine's own from now on, and a WRITE into them is a violation."""
        for end in self.ends:
            end.descriptors["kv"].give_away(self._ids(wanted))

    def hand_out(self, wanted: Registration) -> None:
        """The engine registers these blocks again."""
        for end in self.ends:
            end.descriptors["kv"].take_back(self._ids(wanted))

    def is_written(self, wanted: Registration) -> bool:
        """Whether a WRITE into these blocks is on the wire."""
        ids = set(self._ids(wanted))
        return any(
            write.state is WriteState.PENDING and write.target is end and ids & set(write.remote.tolist())
            for end in self.ends
            for write in end.fabric.writes
            if end.alive
        )

    def _ids(self, wanted: Registration) -> list[int]:
        layers = len(self.memories[0]) // (D_BLOCKS * self.piece)
        return [layer * D_BLOCKS + block for layer in range(layers) for block in wanted.local_block_ids[0]]


class ScriptedHost:
    """A writer's links, its registry and vLLM's worker, scripted. ``links`` has the answers to pushes that ask for a
    link: a link, None for "later", a refusal, or an error.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.links: dict[str, list[Link | Exception | str | None]] = {}
        self.pending: dict[str, Registration] = {}
        self.whole: dict[str, Registration] = {}
        self.handshakes_end_at_once = False
        """Whether a handshake that a push has begun ends before it returns."""
        self.posts_whole = True
        """Whether a push that is to be pushed whole finds the decode engine connected."""
        self.released: list[str] = []
        self.unwanted: set[str] = set()
        self.failures: list[ReportFailure] = []
        self.first_tokens: list[SendFirstToken] = []
        self.connecting: dict[str, Then] = {}
        """The ends of handshakes, by request."""
        self.endings: dict[str, list[str | None]] = {}
        self.whole_writes_ended: list[tuple[str, bool]] = []
        self.transfers: list[tuple[WriteSums, float] | None] = []
        """Pushes by layer, as vLLM's statistics have them; None: a failed one."""
        self.disconnected: list[str] = []
        self.wrongs: list[str] = []
        """Violations; the writer would swallow an exception here."""

    def reported_failures(self, name: str = "p-1") -> list[tuple[str, bool, bool]]:
        """``(reason, drained, cancelled)`` of each failure that was reported to D about a prompt."""
        return [
            (one.reason, one.drained, one.cancelled)
            for one in self.failures
            if one.registration.request_id == f"d-{name}"
        ]

    def is_connected(self, registration: Registration) -> bool:
        return self._answer(registration, None) is not None

    def connect(self, registration: Registration, then: Then) -> None:
        request_id = registration.request_id.removeprefix("d-")
        self.connecting[request_id] = then
        if self.rig.writer._pushes[request_id].is_whole:
            self.whole[request_id] = registration
            ends = self.posts_whole
        else:
            ends = self.handshakes_end_at_once
        if ends:
            then(None, time.perf_counter())

    def refusal(self, registration: Registration) -> str | None:
        answer = self._answer(registration, str)
        return answer if isinstance(answer, str) else None

    def to(self, registration: Registration) -> Link:
        answer = self._answer(registration, Link | Exception)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Link)
        return answer

    def _answer(self, registration: Registration, kind: Any) -> Link | Exception | str | None:
        """The next answer, which is used up if it is of this kind."""
        answers = self.links.get(registration.decode_engine_id)
        if not answers:
            return self.rig.decoders[registration.decode_engine_id].link
        return answers.pop(0) if isinstance(answers[0], type(None) if kind is None else kind) else answers[0]

    def complete(self, link: Link, registration: Registration) -> None:
        for route in link.routes:
            self.rig.p.notify(route.agent, f"{registration.request_id}:1".encode())

    def is_unwanted(self, request_id: str, _now: float) -> bool:
        return request_id in self.unwanted

    def take_registration(self, request_id: str, _now: float) -> Registration | None:
        return self.pending.pop(request_id, None)

    def report_failure(self, report: ReportFailure, _now: float) -> None:
        """A decode engine with a drained failure uses its blocks for other requests at once."""
        self.failures.append(report)
        decoder = self.rig.decoders[report.registration.decode_engine_id]
        if not report.drained:
            return
        if not all(end.alive for end in decoder.ends) and decoder.name not in self.disconnected:
            self.wrongs.append(f"said to have drained before the connection is known to be lost: {report}")
        if decoder.is_written(report.registration):
            self.wrongs.append(f"said to have drained with a WRITE on the wire: {report}")
        if sum(one.drained and one.registration == report.registration for one in self.failures) > 1:
            self.wrongs.append(f"drained twice: {report}")
        decoder.reuse(report.registration)

    def send_first_token(self, action: SendFirstToken, _now: float) -> None:
        self.first_tokens.append(action)

    def push_whole(self, request_id: str, blocks: BlockIds, registration: Registration) -> None:
        """As upstream does when the decode engine is connected."""
        pairs = upstream_pairs(blocks[0], registration.local_block_ids[0])
        layers = range(len(self.rig.layout.layers))
        ours = np.asarray([layer * P_BLOCKS + source for layer in layers for source, _ in pairs], np.int32)
        theirs = np.asarray([layer * D_BLOCKS + target for layer in layers for _, target in pairs], np.int32)
        for route in self.rig.decoders[registration.decode_engine_id].link.routes:
            now = time.perf_counter()
            record = WriteRecord(route.remote_rank, (0, layers[-1]), (0, 0), len(ours), 0, now, now)
            transfer = Transfer(self.rig.p, record, self.rig.p.post_write(route, ours, theirs))
            engine, decode_id = registration.decode_engine_id, registration.request_id
            self.rig.writer.adopt(request_id, transfer, engine, decode_id)

    def whole_write_ended(self, request_id: str, transfer: Transfer, landed: bool) -> None:
        self.whole_writes_ended.append((request_id, landed))

    def lost(self, engine_id: str) -> None:
        self.disconnected.append(engine_id)

    @property
    def transfer_stats(self) -> ScriptedHost:
        return self

    def pushed(self, written: WriteSums, transfer_s: float) -> None:
        self.transfers.append((written, transfer_s))

    def failed(self) -> None:
        self.transfers.append(None)

    def push_ended(self, request_id: str, failure: str | None, _now: float) -> None:
        self.endings.setdefault(request_id, []).append(failure)

    def report_sent(self, request_id: str) -> None:
        self.released.append(request_id)


class Rig:
    def __init__(
        self,
        faults: Faults | None = None,
        layers: int = 3,
        mode: PushMode = PushMode.LAYER,
        seed: int = 0,
        write_timeout_s: float = math.inf,
        meter: PushMeter | None = None,
        engine: Identity | None = None,
        strategy: Callable[[Rig], GatherStrategy] | None = None,
    ) -> None:
        self.layout = layout_of([0] * layers, P_BLOCKS, BLOCK_BYTES)
        self.fabric = FakeFabric(faults, seed)
        self.p = self.fabric.endpoint("P")
        self.p_memory = np.full(layers * P_BLOCKS * BLOCK_BYTES, POISON, np.uint8)
        self.decoders: dict[str, Decoder] = {}
        self.host = ScriptedHost(self)
        self.trace = KeptRecords()
        self.capture = StepEvents(self.layout.index_of, lambda: None, None)
        meter = meter or PushMeter(Recorder())
        self.totals = Totals(meter)
        host: Any = self.host
        self.writer = Pushes(
            engine or Identity("P", 0),
            self.layout,
            mode,
            Writes(self.p, self.layout, None if strategy is None else strategy(self), write_timeout_s),
            self.capture,
            host,
            host,
            self.trace,
            meter,
        )
        self.writer.registry = self.host

    @property
    def sleep_s(self) -> float | None:
        """The writer's longest sleep, in seconds; None: until it is woken."""
        now = time.perf_counter()
        due = self.writer.next_due(now)
        return None if due is None else round(due - now, 9)

    @property
    def layers(self) -> int:
        return len(self.layout.layers)

    def decoder(self, name: str = "D", ranks: int = 1) -> Decoder:
        self.decoders[name] = Decoder(self, name, ranks)
        return self.decoders[name]

    def asks(self, prompt: Prompt, decoder: Decoder, first: int = 10, wanted: int | None = None) -> Registration:
        """A registration of the prompt's last ``wanted`` blocks, into D's blocks from ``first`` on; not yet sent."""
        count = len(prompt.blocks) if wanted is None else wanted
        return registration(range(first, first + count), request_id=f"d-{prompt.name}", engine=decoder.name)

    def registers(self, prompt: Prompt, decoder: Decoder | None = None, **details: int) -> Registration:
        """A decode engine, D by default, registers the prompt before it begins. See ``asks``."""
        decoder = decoder or self.decoders.get("D") or self.decoder()
        wanted = self.host.pending[prompt.name] = self.asks(prompt, decoder, **details)
        return wanted

    def assert_delivered(self, prompt: Prompt, wanted: Registration) -> None:
        """The decode engine has every byte, and each of its ranks got one completion since the last look."""
        decoder = self.decoders[wanted.decode_engine_id]
        assert decoder.told() == [[f"d-{prompt.name}:1".encode()] for _ in decoder.memories]
        assert decoder.holds(prompt, wanted, self.layers)

    def step(
        self,
        *work: tuple[Prompt, int],
        cached: Sequence[tuple[Prompt, int]] = (),
        preempted: Sequence[Prompt] = (),
        hooked: Sequence[int] | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        """One engine step of ``(prompt, tokens)``; the writer gets a turn after every layer.

        ``cached``: prompts, and how many of their tokens were computed before.
        """
        found = [(prompt, prompt.cached(tokens)) for prompt, tokens in cached]
        for prompt, chunk in found:
            self.compute(prompt, chunk)
        chunks = [(prompt, prompt.chunk(tokens)) for prompt, tokens in work]
        plans = tuple(chunk for _, chunk in found + chunks)
        self.capture.arm(StepPlan(plans, tuple(prompt.name for prompt in preempted)))
        self.writer.turn()
        for layer in range(self.layers):
            for prompt, chunk in chunks:
                self._compute(prompt, chunk, layer)
            if hooked is None or layer in hooked:
                self.capture.layer_saved(f"layers.{layer}")
                self.writer.turn()
            if between is not None:
                between()
        self.capture.sweep()
        self.writer.turn()

    def finish(self, prompt: Prompt) -> None:
        """The scheduler has finished the request, and the writer knows it."""
        self.capture.finish(prompt.name, (prompt.blocks,))
        self.writer.turn()

    def accept(self, prompt: Prompt) -> None:
        """The scheduler has processed the prompt's last step; the writer knows it."""
        self.capture.arm(StepPlan(accepted=(prompt.name,)))
        self.writer.turn()

    def abort(self, prompt: Prompt) -> None:
        """The scheduler has dropped the request and freed its blocks; the writer may not know it yet."""
        self.capture.arm(StepPlan(), [prompt.name])

    def expire(self, prompt: Prompt) -> None:
        self.capture.expire(prompt.name)

    def settle(self, turns: int = 60) -> None:
        """Let the wire run empty."""
        for _ in range(turns):
            self.writer.turn()

    def compute(self, prompt: Prompt, chunk: ChunkPlan) -> None:
        """Fill the chunk's blocks of all layers."""
        for layer in range(self.layers):
            self._compute(prompt, chunk, layer)

    def _compute(self, prompt: Prompt, chunk: ChunkPlan, layer: int) -> None:
        part = chunk.groups[0]
        for index, block in enumerate(part.blocks, part.first):
            at = (layer * P_BLOCKS + block) * BLOCK_BYTES
            self.p_memory[at : at + BLOCK_BYTES] = prompt.kv(layer, index)

    def scribble(self, blocks: Iterable[int]) -> None:
        """P's scheduler gave these blocks to another request, which has filled them."""
        for layer in range(self.layers):
            for block in blocks:
                at = (layer * P_BLOCKS + block) * BLOCK_BYTES
                self.p_memory[at : at + BLOCK_BYTES] = 0xBB

    def assert_clean(self) -> None:
        """No push in the table, no handle kept, no stray WRITE, even after all WRITEs have landed."""
        self.fabric.settle()
        assert self.host.wrongs == []
        assert len(self.writer) == 0
        assert not self.p._live
        assert not [write for write in self.p._released if write.target.alive], "released while it could still land"
        assert self.fabric.violations == []
        assert not self.writer.engines_in_use
        assert not self.writer.engines_in_flight
