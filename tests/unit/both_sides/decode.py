"""A decode engine of one or two ranks: its scheduler's loads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from msgspec import structs

from layerpush.compat.metadata import ABORTED
from layerpush.core.first_token import Missing
from layerpush.core.load_news import (
    LoadCleared,
    LoadCompleted,
    LoadKept,
    LoadNews,
    LoadParked,
    LoadQueued,
    LoadToken,
    LoadUnregistered,
    RequestNews,
)
from layerpush.core.replica import Replica
from layerpush.core.request_names import named_prompts
from layerpush.core.wire import PROTOCOL_VERSION, Decline, Registration
from layerpush.engine.scheduler import turn_protocol
from layerpush.engine.scheduler.awaited_pushes import AwaitedPushes
from layerpush.engine.scheduler.postponed_loads import PostponedLoads
from layerpush.engine.scheduler.turns import Turns
from layerpush.transport.kv_parts import CHECKSUM
from layerpush.transport.peers import Address
from tests.unit.both_sides.decode_rank import DecodeRank
from tests.unit.both_sides.process import BLOCK_SIZE, D_BLOCKS, HEADS, NOWHERE, SAMPLING, Pool, Prompt, Turn
from tests.unit.builders import BlockPool

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tests.unit.both_sides.world import World

OVERDUE_S: Sequence[float] = (2.0, 60.0, 60.0)
"""A load draws one: the first ends while P writes."""


@dataclass
class Waiting:
    """A request that waits for blocks."""

    prompt: Prompt
    request_id: str
    prefill_request_id: str | None
    cached: int
    attempt: int = 0


@dataclass
class Load:
    prompt: Prompt
    request_id: str
    blocks: list[int]
    sampling: str | None
    """Parameters for P's first token, if the load asks for it."""
    waiting: Waiting
    """Its entry in the queue."""
    reports: dict[int, bool] = field(default_factory=dict)
    """The ranks that have reported it as over, each with whether it has all of its KV."""
    first_tokens: dict[int, int | Missing] = field(default_factory=dict)
    """By rank."""
    outcome: str | None = None
    parked: set[int] = field(default_factory=set)
    kept_tokens: dict[int, int] = field(default_factory=dict)
    """By rank that has failed."""
    kept: int = 0
    """Its first blocks that have landed although the load has failed."""
    given: int = 0
    """Its first blocks that were given away while the others are parked."""
    damaged: bool = False
    """Whether the engine has damaged one of its blocks."""
    aborted: bool = False


class DecodeEngine:
    def __init__(self, world: World, engine_id: str, size: int) -> None:
        self.world, self.engine_id, self.size = world, engine_id, size
        self.frozen = False
        self.pool = Pool(world.decode_blocks)
        self.loads: dict[str, Load] = {}
        self.queue: list[Waiting] = []
        self._numbers = itertools.count(1)
        self.postponed = PostponedLoads(size)
        self._held = BlockPool(D_BLOCKS)
        self.awaited = AwaitedPushes(math.inf, self._held)
        self.turns = Turns(BlockPool(0), 1)
        self.ranks = [DecodeRank(world, self, rank) for rank in range(size)]

    @property
    def processes(self) -> list[DecodeRank]:
        return self.ranks

    def load(self, prompt: Prompt, prefill_request_id: str | None, cached: int, *, first: bool = False) -> None:
        """Ask for the KV of a prompt; ``cached`` of its blocks are here already. ``first``: before all that wait."""
        request_id = self.world.new_id(prompt.base)
        if isinstance(prompt, Turn):
            digest = prompt.prefixes.digest(prompt.tokens)
            self.turns.bring(request_id, turn_protocol.Register(prompt.tokens, digest or ""))
        self._wait(Waiting(prompt, request_id, prefill_request_id, cached), first=first)
        self.schedule()

    def _wait(self, waiting: Waiting, *, first: bool) -> None:
        self.queue.insert(0 if first else len(self.queue), waiting)
        self.postponed.request_waits(waiting.request_id, named_prompts([waiting.prompt.base], waiting.prompt.text))

    def schedule(self) -> None:
        """Give blocks to requests in the order of the queue."""
        short = False
        for waiting in list(self.queue):
            if self.postponed.must_wait(waiting.request_id):
                continue
            blocks = self.pool.take(waiting.prompt.blocks - waiting.cached)
            if blocks is None:
                short = True
                break
            self.queue.remove(waiting)
            self.postponed.request_placed(waiting.request_id)
            self._register(waiting, blocks)
        for request_id in self.postponed.to_unregister(short):
            self._tell(lambda rank, each=request_id: rank.open_loads.unregister(each, self.world.now))

    def _tell(self, task: Callable[[DecodeRank], None]) -> None:
        """Each rank does this at its next turn."""
        for rank in self.ranks:
            rank.task(lambda rank=rank: task(rank))

    def _register(self, waiting: Waiting, blocks: list[int]) -> None:
        prompt, prefill_request_id = waiting.prompt, waiting.prefill_request_id
        sampling = self.world.questions.choice([*3 * [SAMPLING], "warmer", None])
        digest: str | None = prompt.text
        prefix_tokens = 0
        if isinstance(prompt, Turn):
            (register,) = self.turns.handle(waiting.request_id, turn_protocol.Placed(len(blocks) * BLOCK_SIZE))
            assert isinstance(register, turn_protocol.Register)
            sampling, digest, prefix_tokens = None, register.digest, register.tokens
        load = Load(prompt, waiting.request_id, blocks, sampling, waiting)
        self.loads[load.request_id] = load
        overdue_s = self.world.questions.choice(OVERDUE_S)
        held = [self._held.blocks[block] for block in blocks]
        self.awaited.await_push(load.request_id, held, self.world.now, overdue_s)
        for rank in self.ranks:
            rank.hand_to(blocks, prompt.text)
        registration = Registration(
            request_id=load.request_id,
            decode_engine_id=self.engine_id,
            decode_host=f"host-of-{self.engine_id}",
            decode_port=5000,
            decode_tp_size=self.size,
            local_block_ids=(tuple(blocks),),
            layerpush=PROTOCOL_VERSION,
            prefill_request_id=prefill_request_id,
            prompt_digest=digest,
            prefix_tokens=prefix_tokens,
            sampling=sampling,
            attempt=waiting.attempt,
            acknowledges=not self.world.fabric.ordered,
            number=next(self._numbers),
            verifies=CHECKSUM,
        )
        address = self.prefill_address(NOWHERE if self.world.routers.random() < self.world.mistaken else "host-of-P")

        def register(rank: DecodeRank) -> None:
            mine = structs.replace(registration, contact=rank.name.encode())
            rank.open_loads.register(mine, address, {}, self.world.now)

        self._tell(register)

    def refuse(self, prompt: Prompt, prefill_request_id: str | None) -> None:
        """D computes the prompt itself."""
        names = self.world.new_id(prompt.base), self.engine_id, prefill_request_id, prompt.text
        self._tell(lambda rank: rank.open_loads.decline(self.prefill_address(), Decline(*names)))

    def prefill_address(self, host: str = "host-of-P") -> Address:
        return Address("P", host, 5000, self.world.ranks, notify_only=True)

    def abort(self, load: Load) -> None:
        """The scheduler keeps the blocks until the worker reports the load's end."""
        load.aborted = True
        self.turns.handle(load.request_id, turn_protocol.Finished())
        self.postponed.request_finished(load.request_id)
        self.awaited.request_finished(load.request_id)
        self._cancel()

    def _cancel(self) -> None:
        """Cancel the loads that are aborted or overdue."""
        for request_id, reason in self.awaited.take_cancelled(self.world.now).items():

            def cancel(rank: DecodeRank, request_id: str = request_id, reason: str = reason) -> None:
                end = rank.open_loads.abort if reason == ABORTED else rank.open_loads.time_out
                end(request_id, reason, self.world.now)

            self._tell(cancel)

    def begin_turn(self) -> None:
        self._cancel()
        if self.world.prefill is not None and not self.world.prefill.frozen:
            asked = [each.prompt.base for each in (*self.queue, *self.loads.values())]
            self.world.prefill.extend_leases(set(asked))

    # From the ranks.

    def reported(self, rank: int, news: LoadNews) -> None:
        if isinstance(news, RequestNews) and self.loads[news.request_id].aborted:
            return
        match news:
            case LoadToken():
                self._first_token(rank, news.request_id, news.token)
            case LoadQueued():
                self.postponed.load_queued(news.request_id, news.computed)
            case LoadUnregistered():
                self.postponed.load_unregistered(news.request_id, news.rank)
            case LoadParked():
                self._park(rank, news)
            case LoadKept():
                self._keep(rank, news.request_id, news.tokens)
            case LoadCleared():
                self._clear(rank, news)
            case LoadCompleted():
                assert news.at is not None

    def _first_token(self, rank: int, request_id: str, first_token: int | Missing) -> None:
        load = self.loads[request_id]
        assert load.sampling is not None, f"{load} did not ask"
        assert rank not in load.first_tokens, f"{load} gets a second first token"
        assert load.outcome is None
        fits = load.sampling == SAMPLING and first_token == load.prompt.first_token
        assert fits or not isinstance(first_token, int), f"{load} gets the wrong token {first_token}"
        assert first_token != "other_sampling" or load.sampling != SAMPLING
        load.first_tokens[rank] = first_token
        self.world.tokens["token" if fits else str(first_token)] += 1

    def _park(self, rank: int, news: LoadParked) -> None:
        load = self.loads[news.request_id]
        assert rank not in load.reports
        assert rank not in load.parked
        load.parked.add(rank)
        self.awaited.block_holds.park(news.request_id, news.rank)

    def _keep(self, rank: int, request_id: str, tokens: int) -> None:
        """The prefix cache has these blocks from now on, whatever becomes of the others."""
        load = self.loads[request_id]
        assert rank not in load.reports
        load.kept_tokens[rank] = tokens
        if not tokens:
            return
        assert tokens % BLOCK_SIZE == 0
        assert 0 < tokens < load.prompt.tokens
        assert self._kept(load, tokens) > 0, "D has them already"

    def _kept(self, load: Load, tokens: int) -> int:
        return tokens // BLOCK_SIZE - (load.prompt.blocks - len(load.blocks))

    def _clear(self, rank: int, news: LoadCleared) -> None:
        assert news.request_id in self.loads, "its blocks are free already"
        load = self.loads[news.request_id]
        assert rank in load.parked
        load.parked.remove(rank)
        self.awaited.block_holds.clear(news.request_id, news.rank)
        if load.outcome is not None:
            self._give_away(load)

    def load_ended(self, rank: int, request_id: str, *, loaded: bool) -> None:
        """A rank has all of the KV, or will not have it. vLLM goes on when all ranks have reported."""
        load = self.loads[request_id]
        assert rank not in load.reports, f"{load} is reported again, by rank {rank}"
        load.reports[rank] = loaded
        asked = loaded and load.sampling is not None
        assert load.aborted or (rank in load.first_tokens) == asked, f"{load} lacks its answer, or did not ask"
        if len(load.reports) == self.size:
            self._end(load, loaded=all(load.reports.values()))

    def _end(self, load: Load, *, loaded: bool) -> None:
        again = self.postponed.load_ended(load.request_id)
        assert not (again and (loaded or load.aborted))
        load.outcome = "loaded" if loaded else "unregistered" if again else "failed"
        self.world.outcomes[load.outcome] += 1
        self.awaited.loads_ended([load.request_id])
        counted = self.turns.handle(load.request_id, turn_protocol.LoadEnded(not loaded))
        self.world.returned += len(counted)
        self._keep_prefix(load)
        self._give_away(load)
        if again:
            self._wait(replace(load.waiting, attempt=load.waiting.attempt + 1), first=True)

    def _keep_prefix(self, load: Load) -> None:
        """The prefix cache has these blocks from now on, whatever becomes of the others."""
        tokens = min(load.kept_tokens.values(), default=0)
        if not tokens:
            return
        load.kept = self._kept(load, tokens)
        for rank in self.ranks:
            if not rank.holds(load, load.blocks[: load.kept]):
                rank.accuse(f"{load} keeps wrong bytes")
        self.world.kept_blocks += load.kept

    def _give_away(self, load: Load) -> None:
        """All blocks, or the ones that are kept if the others are parked."""
        if load.request_id in self.awaited.block_holds:
            last = load.kept
        else:
            last = len(load.blocks)
            del self.loads[load.request_id]
        blocks, load.given = load.blocks[load.given : last], last
        for rank in self.ranks:
            rank.give_away(blocks)
        self.pool.give_back(blocks)

    # Of the world.

    def check_post(self, agent: str, key: Hashable, ids: Sequence[int]) -> None:
        """No WRITE is posted into memory that another WRITE uses."""
        for rank in self.ranks:
            if rank.name == agent:
                rank.check_post(key, ids)

    def blocks_of_others(self, replica: Replica, ids: Sequence[int]) -> set[int]:
        """The blocks among these descriptors that another rank of P is to send."""
        blocks = {index % D_BLOCKS for index in ids}
        loads = self.loads.values()
        places = {block: place for load in loads for place, block in enumerate(load.blocks) if place >= load.given}
        return {block for block in blocks if block in places and not replica.owns(places[block])}

    def damage(self, load: Load, layer: int, token: int, head: int) -> None:
        """The engine overwrites a byte of a load that is under way. ``token`` counts from the first one that it loads.

        Bytes behind the prompt's last token may be anything.
        """
        load.damaged = True
        block, place = divmod(token, BLOCK_SIZE)
        rank, own_head = divmod(head, HEADS // self.size)
        self.ranks[rank].damage(layer, load.blocks[block], own_head * BLOCK_SIZE + place)

    @property
    def damageable(self) -> list[Load]:
        """Loads of which no rank of P has written everything: what follows is compared, unless it is pushed whole."""
        found = [load for load in self.loads.values() if not load.reports]
        return [load for load in found if all(self._is_unwritten(load, rank) for rank in self.ranks)]

    def _is_unwritten(self, load: Load, rank: DecodeRank) -> bool:
        known = rank.open_loads._open.get(load.request_id)
        return known is not None and known.session.landed == 0

    def assert_idle(self) -> None:
        for rank in self.ranks:
            rank.assert_idle()
        assert not self.loads
        assert not self.queue
        assert not self.awaited.needs_steps
        assert len(self.awaited) == len(self.awaited.block_holds) == 0
        assert not self._held.owned
        assert len(self.pool.free) == self.pool.size - 1
