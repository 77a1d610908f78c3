"""A prefill engine of one or two ranks: its scheduler and forward pass."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerpush.core.first_token import Sampled
from layerpush.core.push_mode import PushMode
from layerpush.core.request_names import Arrived
from layerpush.core.step_plan import ChunkPlan, PromptProgress, StepPlan
from layerpush.engine.scheduler.turn_protocol import RankEnded
from layerpush.engine.scheduler.turns import Turns
from tests.unit.both_sides.prefill_rank import PrefillRank
from tests.unit.both_sides.process import (
    BLOCK_SIZE,
    LAYERS,
    SAMPLING,
    Pool,
    Prompt,
    Turn,
)
from tests.unit.builders import BlockPool, wait_at_random

if TYPE_CHECKING:
    from tests.unit.both_sides.world import World

LEASE_S = 60.0


@dataclass
class Request:
    """One request in P's scheduler. ``table`` is None while it has no blocks."""

    prompt: Prompt
    request_id: str
    table: list[int] | None
    progress: PromptProgress = field(init=False)
    computed: int = 0
    leased_until: float | None = None
    lost: int | None = None
    """The first block that the running step reads wrong: another connector has lost it."""
    unprocessed: bool = False
    """Whether a step of it has run, and its result is not processed."""
    over: set[int] = field(default_factory=set)
    """Ranks that sent the request, or whose lease ran out."""

    def __post_init__(self) -> None:
        self.progress = PromptProgress(self.request_id, (BLOCK_SIZE,))

    @property
    def is_computed(self) -> bool:
        return self.computed == self.prompt.tokens


class PrefillEngine:
    def __init__(self, world: World, engine_id: str, size: int) -> None:
        self.world, self.engine_id, self.size = world, engine_id, size
        self.frozen = False
        self.pool = Pool(world.prefill_blocks)
        self.turn_blocks = BlockPool(world.prefill_blocks)
        self.turns = Turns(self.turn_blocks, size)
        self.requests: dict[str, Request] = {}
        self.step: tuple[Request, ChunkPlan] | None = None
        self.layers_left: list[int] = []
        self.ranks = [self._rank(rank) for rank in range(size)]

    def _rank(self, number: int) -> PrefillRank:
        rank = PrefillRank(self.world, self, number)
        if self.world.mode is PushMode.AUTO:
            wait_at_random(rank.writer, random.Random(number))
        return rank

    @property
    def processes(self) -> list[PrefillRank]:
        return self.ranks

    # The scheduler.

    def accept(self, prompt: Prompt) -> Request:
        request = Request(prompt, self.world.new_id(prompt.base), None)
        self.requests[request.request_id] = request
        for rank in self.ranks:
            rank.claims.requests_arrived([Arrived(request.request_id, None, prompt.text)])
        return request

    def keep(self, turn: Turn) -> None:
        """The engine has answered a turn, and keeps its blocks for the next one."""
        assert self.step is None
        accepted, table = self.process(), self.pool.take(turn.blocks)
        request = Request(turn, self.world.new_id(turn.base), table)
        if table is not None:
            request.computed, request.leased_until = turn.tokens, self.world.now + LEASE_S
            self.requests[request.request_id] = request
            self.world.turns.append((request.request_id, turn))
            self.turns.keep(request.request_id, table)
        for rank in self.ranks:
            if table is not None:
                rank.own(table, turn.text)
                self._fill(rank, turn, table)
                rank.claims.requests_arrived([Arrived(request.request_id, prefixes=turn.prefixes)])
                rank.capture.finish(request.request_id, (list(table),), tokens=turn.tokens, is_turn=True)
            rank.capture.arm(StepPlan(accepted=accepted))

    def release_turns(self, *, reset: bool) -> None:
        """The engine needs the blocks of a turn, or its prefix cache is reset."""
        now = self.world.now
        for request_id in self.turns.release(now) if reset else self.turns.give_way(0, now, short=True):
            self.requests[request_id].leased_until = now
        self._free_turns()

    def _free_turns(self) -> None:
        free = set(range(self.pool.size)).difference(self.turn_blocks.owned)
        for request in [each for each in self.requests.values() if isinstance(each.prompt, Turn)]:
            if free.issuperset(request.table or ()):
                self._give_away(request)
                del self.requests[request.request_id]

    def begin_step(
        self, request: Request, tokens: int, cached: int = 0, loaded: int = 0, lost: int | None = None
    ) -> bool:
        """``cached`` blocks are in the prefix cache, if it is the request's first step. Another connector then loads
        ``loaded`` blocks, and loses the one with the index ``lost`` among them.
        """
        assert self.step is None
        accepted = self.process()
        chunks = []
        if request.table is None:
            request.table = self.pool.take(request.prompt.blocks)
            for rank in self.ranks:
                rank.claims.short_of_blocks = request.table is None
            if request.table is None:
                return False
            for rank in self.ranks:
                rank.own(request.table, request.prompt.text)
            cached = min(cached, (request.prompt.tokens - 1) // BLOCK_SIZE)
            if cached:
                chunks.append(self._found(request, request.table, cached))
            loaded = min(loaded, (request.prompt.tokens - 1) // BLOCK_SIZE - cached)
            if loaded > 0:
                request.progress.provisional = True
                request.computed += loaded * BLOCK_SIZE
                if lost is not None and lost < loaded:
                    request.lost = cached + lost
        epoch = request.progress.epoch
        chunk = request.progress.advance(request.computed, tokens, request.prompt.tokens, [request.table])
        assert chunk is not None
        request.computed = chunk.end
        request.unprocessed = True
        rewound = (request.request_id,) if request.progress.epoch != epoch else ()
        self.step, self.layers_left = (request, chunk), list(range(LAYERS))
        for rank in self.ranks:
            rank.capture.arm(StepPlan((*chunks, chunk), rewound=rewound, accepted=accepted))
        return True

    def process(self) -> tuple[str, ...]:
        """Process the result of the last step, before anything else happens to its request.

        Takes the step back if another connector has lost a block. Returns the request if its prompt is accepted.
        """
        accepted = []
        for request in self.requests.values():
            if not request.unprocessed:
                continue
            request.unprocessed = False
            if request.lost is not None:
                request.computed, request.lost = request.lost * BLOCK_SIZE, None
                self.world.rewinds += 1
            elif request.progress.provisional and request.is_computed:
                accepted.append(request.request_id)
        return tuple(accepted)

    def step_without_work(self) -> None:
        """The engine steps for another request that is not pushed."""
        accepted = self.process()
        for rank in self.ranks:
            rank.capture.arm(StepPlan(accepted=accepted))

    def _found(self, request: Request, table: list[int], blocks: int) -> ChunkPlan:
        """Fills the blocks with the prompt's KV, as if earlier steps had left it there."""
        for rank in self.ranks:
            self._fill(rank, request.prompt, table[:blocks])
        request.computed = blocks * BLOCK_SIZE
        chunk = request.progress.plan_cached(request.computed, request.prompt.tokens, [table])
        assert chunk is not None
        return chunk

    def _fill(self, rank: PrefillRank, prompt: Prompt, blocks: list[int]) -> None:
        for layer in range(LAYERS):
            for index, block in enumerate(blocks):
                rank.write_kv(layer, block, prompt.kv(layer, index))

    def run_layer(self, hooked: bool) -> None:
        """Attention of the next layer; after the last one the step is over."""
        assert self.step is not None
        request, chunk = self.step
        layer = self.layers_left.pop(0)
        part = chunk.groups[0]
        for rank in self.ranks:
            for index, block in enumerate(part.blocks, part.first):
                kv = request.prompt.kv(layer, index, chunk.epoch)
                rank.write_kv(layer, block, kv if request.lost is None or index < request.lost else kv ^ 1)
            if hooked:
                rank.capture.layer_saved(f"layers.{layer}")
            if not self.layers_left:
                rank.capture.sweep()
        if not self.layers_left:
            self.step = None

    def preempt(self, request: Request) -> None:
        self.process()
        for rank in self.ranks:
            rank.capture.arm(StepPlan((), (request.request_id,)))
        self._give_away(request, read=True)
        request.progress.restart()
        request.computed = 0

    def abort(self, request: Request) -> None:
        self.process()
        for rank in self.ranks:
            rank.capture.arm(StepPlan(), [request.request_id])
        self._give_away(request, read=True)
        del self.requests[request.request_id]

    def finish(self, request: Request) -> None:
        self.process()
        if not request.is_computed:
            return  # its last step was taken back
        assert request.table is not None
        request.leased_until = self.world.now + LEASE_S
        for rank in self.ranks:
            sampled = Sampled(request.prompt.first_token, SAMPLING)
            rank.capture.finish(request.request_id, (list(request.table),), sampled)

    def extend_leases(self, bases: set[str]) -> None:
        """Heartbeats name requests by their base ids."""
        for request in self.requests.values():
            is_named = request.leased_until is not None and request.prompt.base in bases
            if is_named and not any(rank.claims.may_lapse(request.request_id) for rank in self.ranks):
                request.leased_until = self.world.now + LEASE_S

    def reap_leases(self) -> None:
        for request in list(self.requests.values()):
            if request.leased_until is None or self.world.now < request.leased_until:
                continue
            for rank in self.ranks:
                if rank.rank not in request.over and not rank.writer.writes_in_flight(request.request_id):
                    rank.capture.expire(request.request_id)
                    self.lease_over(request.request_id, rank)

    def lease_over(self, request_id: str, rank: PrefillRank) -> None:
        request = self.requests.get(request_id)
        if request is None or rank.rank in request.over:
            return
        assert request.leased_until is not None, "sent before it was finished"
        request.over.add(rank.rank)
        rank.evictions.append(request_id)
        if isinstance(request.prompt, Turn):
            self.turns.handle(request_id, RankEnded(rank.rank))
            self._free_turns()
        elif len(request.over) == self.size:
            self._give_away(request)
            del self.requests[request_id]

    @property
    def holders(self) -> dict[int, str]:
        """The owner of each block, as the scheduler sees it."""
        return {block: request.prompt.text for request in self.requests.values() for block in request.table or ()}

    def _give_away(self, request: Request, *, read: bool = False) -> None:
        """Only a preemption or an abort gives blocks away under WRITEs. No completion may follow then."""
        self.world.check_posts()
        blocks, request.table = request.table, None
        if blocks is not None:
            self.pool.give_back(blocks)
            for rank in self.ranks:
                under_writes = rank.reading.intersection(rank.descriptor_ids(slice(None), blocks)) - {
                    index for index, _ in rank.still_read
                }
                assert read or not under_writes, f"{request} was freed under a WRITE"
                rank.give_away(blocks, request.prompt.text)

    def assert_idle(self) -> None:
        for rank in self.ranks:
            rank.assert_idle()
        assert not self.requests
        assert not self.turns.needs_steps
        assert len(self.pool.free) == self.pool.size - 1
