"""A prefill rank's writer on a fake network: real bytes on both sides, a forward pass played layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from layerpush.prefill.capture import Capture, NoFences
from layerpush.prefill.host import Identity
from layerpush.prefill.outbox import RankWrite
from layerpush.prefill.plan import ChunkPlan, PromptProgress, StepPlan
from layerpush.prefill.policy import Policy
from layerpush.prefill.push import BlockIds
from layerpush.prefill.staging import Link
from layerpush.prefill.writer import PushWriter
from layerpush.trace import PushRecord, TraceFile, WriteRecord
from layerpush.transport.base import Route
from layerpush.transport.fake import Bytes, FakeFabric, FakeTransport, Faults
from layerpush.wire import Registration
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
    progress: PromptProgress = field(init=False)
    computed: int = 0

    def __post_init__(self) -> None:
        self.progress = PromptProgress(self.name, (BLOCK_SIZE,))

    @property
    def blocks(self) -> list[int]:
        return self.table[: blocks_of(self.tokens, BLOCK_SIZE)]

    def chunk(self, tokens: int) -> ChunkPlan:
        plan = self.progress.advance(self.computed, tokens, self.tokens, [self.table])
        assert plan is not None
        self.computed = plan.end
        return plan

    def preempted(self, table: list[int]) -> None:
        self.progress.restart()
        self.computed, self.table = 0, table

    def kv(self, layer: int, index: int) -> Bytes:
        """What attention leaves in a block; it depends on the tokens only, so it is the same in every epoch."""
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
        """The engine was told: these blocks are its own from now on, and a WRITE into them is a violation."""
        layers = len(self.memories[0]) // (D_BLOCKS * self.piece)
        ids = [layer * D_BLOCKS + block for layer in range(layers) for block in wanted.local_block_ids[0]]
        for end in self.ends:
            end.descriptors["kv"].give_away(ids)


class ScriptedHost:
    """The worker's part, as a test wants it. ``links`` answers ``connect``: a link, None for "later", or an error."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.links: dict[str, list[Link | Exception | None]] = {}
        self.pending: dict[str, Registration] = {}
        self.unmatched: dict[str, BlockIds] = {}
        self.released: list[str] = []
        self.kept: list[Registration] = []
        self.ended: list[tuple[str, bool]] = []

    def connect(self, request_id: str, registration: Registration) -> Link | None:
        answers = self.links.get(registration.decode_engine_id)
        answer = answers.pop(0) if answers else self.rig.decoders[registration.decode_engine_id].link
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take_registration(self, request_id: str) -> Registration | None:
        return self.pending.pop(request_id, None)

    def keep_registration(self, registration: Registration) -> None:
        self.kept.append(registration)

    def delegate(self, request_id: str, blocks: BlockIds, registration: Registration | None) -> None:
        registration = registration or self.take_registration(request_id)
        if registration is None:
            self.unmatched[request_id] = blocks
            return
        pairs = upstream_pairs(blocks[0], registration.local_block_ids[0])
        layers = range(len(self.rig.layout.layers))
        ours = np.asarray([layer * P_BLOCKS + source for layer in layers for source, _ in pairs], np.int32)
        theirs = np.asarray([layer * D_BLOCKS + target for layer in layers for _, target in pairs], np.int32)
        for route in self.rig.decoders[registration.decode_engine_id].link.routes:
            record = WriteRecord(route.remote_rank, (0, layers[-1]), (0, 0), len(ours), 0, 0.0, 0.0)
            part = RankWrite(self.rig.p.post_write(route, ours, theirs), record)
            engine, decode_id = registration.decode_engine_id, registration.request_id
            self.rig.writer.adopt(request_id, part, engine, decode_id)

    def delegated_write_ended(self, request_id: str, part: RankWrite, landed: bool) -> None:
        self.ended.append((request_id, landed))

    def completion(self, registration: Registration) -> bytes:
        return f"{registration.request_id}:1".encode()

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class Rig:
    def __init__(
        self, faults: Faults | None = None, layers: int = 3, policy: Policy | None = None, seed: int = 0
    ) -> None:
        self.layout = layout_of([0] * layers, P_BLOCKS, BLOCK_BYTES)
        self.fabric = FakeFabric(faults, seed)
        self.p = self.fabric.endpoint("P")
        self.p_memory = np.full(layers * P_BLOCKS * BLOCK_BYTES, POISON, np.uint8)
        self.decoders: dict[str, Decoder] = {}
        self.host = ScriptedHost(self)
        self.trace = KeptRecords()
        self.capture = Capture(self.layout.index_of, lambda: None, NoFences())
        identity = Identity("P", 0, "layer")
        self.writer = PushWriter(identity, self.layout, policy or Policy(), self.p, self.capture, self.host, self.trace)

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

    def step(
        self,
        *work: tuple[Prompt, int],
        preempted: Sequence[Prompt] = (),
        hooked: Sequence[int] | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        """One engine step of ``(prompt, tokens)``; the writer gets a turn after every layer."""
        chunks = [(prompt, prompt.chunk(tokens)) for prompt, tokens in work]
        self.capture.arm(StepPlan(tuple(chunk for _, chunk in chunks), tuple(prompt.name for prompt in preempted)))
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
        """The scheduler has finished the request, and the writer has heard of it."""
        self.capture.finish(prompt.name, (prompt.blocks,))
        self.writer.turn()

    def abort(self, prompt: Prompt) -> None:
        """The scheduler has dropped the request and freed its blocks; the writer may not have heard of it."""
        self.capture.arm(StepPlan(), [prompt.name])

    def expire(self, prompt: Prompt) -> None:
        self.capture.expire(prompt.name)

    def settle(self, turns: int = 60) -> None:
        """Let the wire run empty."""
        for _ in range(turns):
            self.writer.turn()

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
        """No push in the table, no handle kept, no WRITE where it should not be."""
        assert len(self.writer) == 0
        assert not self.p._live
        assert not [write for write in self.p._released if write.target.alive], "released while it could still land"
        assert self.fabric.violations == []
        assert not self.writer.engines_in_use
