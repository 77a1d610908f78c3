"""A decode engine of one rank: its scheduler's loads, and the real ones of its worker."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from layerpush.core.first_token import Missing
from layerpush.core.liveness import PeerWatch
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
from layerpush.core.wire import (
    PROTOCOL_VERSION,
    Completion,
    Decline,
    Message,
    PartSums,
    Pong,
    Registration,
    read,
)
from layerpush.decode.checks import Checks
from layerpush.decode.early_messages import LoadMessage
from layerpush.decode.loads import Loads
from layerpush.decode.outcomes import Outcomes
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.engine.scheduler import turn_protocol
from layerpush.engine.scheduler.postponed_loads import PostponedLoads
from layerpush.engine.scheduler.turns import Turns
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.kv_parts import CHECKSUM, KvParts
from layerpush.transport.peers import Address
from tests.support.fake_transport import Descriptors, FakeWrite
from tests.unit.both_sides.process import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    D_BLOCKS,
    HEADS,
    LAYERS,
    NOWHERE,
    POISON,
    SAMPLING,
    Pool,
    Process,
    Prompt,
    Turn,
    kv_layers,
)
from tests.unit.builders import BlockPool

if TYPE_CHECKING:
    from tests.unit.both_sides.world import World

PEER_TIMEOUT_S = 20.0
OVERDUE_S: tuple[float, ...] = (2.0, 60.0, 60.0)
"""A load draws one: the first ends while P writes."""
MISTAKEN, HEARTBEAT = 0.1, 0.2
"""Probabilities: a load names the wrong host for P; vLLM sends a heartbeat in a turn."""


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
    deadline: float
    sampling: str | None
    """Parameters for P's first token, if the load asks for it."""
    waiting: Waiting
    """Its entry in the queue."""
    first_token: int | Missing | None = None
    outcome: str | None = None
    parked: bool = False
    kept: int = 0
    """Its first blocks that have landed although the load has failed."""
    given: int = 0
    """Its first blocks that were given away while the others are parked."""
    damaged: bool = False
    """Whether the engine has damaged one of its blocks."""
    aborted: bool = False
    overdue: bool = False


class DecodeEngine(Process):
    world_size, tp_rank = 1, 0

    def __init__(self, world: World, engine_id: str) -> None:
        super().__init__(world, engine_id, 0)
        self.frozen = False
        self.processes: list[Process] = [self]
        self.pool = Pool(world.decode_blocks)
        self.loads: dict[str, Load] = {}
        self.queue: list[Waiting] = []
        self._numbers = itertools.count(1)
        self.postponed = PostponedLoads(1)
        self.turns = Turns(BlockPool(0), 1)
        self.memory = np.full(LAYERS * D_BLOCKS * BLOCK_BYTES, POISON, np.uint8)
        self.watch = PeerWatch(PEER_TIMEOUT_S)
        self.caches: list[Descriptors] = []
        for pieces in (1, 2):
            for rank in (0, 1):  # P's; two ranks that hold the same may send the same block
                piece = BLOCK_BYTES // pieces
                starts = range(rank % pieces * piece, self.memory.size, BLOCK_BYTES)
                self.caches.append(self.endpoint.describe((pieces, rank), self.memory, starts, piece))
                self.caches[-1].give_away(range(len(starts)))
        recorder = Recorder()
        worker: Any = self
        peers = PrefillPeers(worker, self.connections, self.watch, self.probe, recorder)
        outcomes = Outcomes(worker, 0, self._reported, TraceFile(None, engine_id, 0), recorder)
        caches = torch.from_numpy(self.memory).view(LAYERS, D_BLOCKS, HEADS, BLOCK_SIZE, 1)
        checks = _Checks(self, KvParts(kv_layers(caches, HEADS), 0, 1), recorder)
        self.open_loads = Loads(worker, PEER_TIMEOUT_S, peers, outcomes, self.peer_errors, checks)

    # The scheduler.

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
            self.task(partial(self._unregister, request_id))

    def _unregister(self, request_id: str) -> None:
        self.open_loads.unregister(request_id, self.world.now)

    def _register(self, waiting: Waiting, blocks: list[int]) -> None:
        prompt, prefill_request_id = waiting.prompt, waiting.prefill_request_id
        sampling = self.world.questions.choice([*3 * [SAMPLING], "warmer", None])
        digest: str | None = prompt.text
        prefix_tokens = 0
        if isinstance(prompt, Turn):
            (register,) = self.turns.handle(waiting.request_id, turn_protocol.Placed(len(blocks) * BLOCK_SIZE))
            assert isinstance(register, turn_protocol.Register)
            sampling, digest, prefix_tokens = None, register.digest, register.tokens
        deadline = self.world.now + self.world.questions.choice(OVERDUE_S)
        load = Load(prompt, waiting.request_id, blocks, deadline, sampling, waiting)
        self.loads[load.request_id] = load
        for owned in self.caches:
            owned.hand_to(self._ids(blocks), prompt.text)
        registration = Registration(
            request_id=load.request_id,
            decode_engine_id=self.engine_id,
            decode_host=f"host-of-{self.engine_id}",
            decode_port=5000,
            decode_tp_size=1,
            local_block_ids=(tuple(blocks),),
            layerpush=PROTOCOL_VERSION,
            prefill_request_id=prefill_request_id,
            prompt_digest=digest,
            prefix_tokens=prefix_tokens,
            sampling=sampling,
            contact=self.name.encode(),
            attempt=waiting.attempt,
            acknowledges=not self.world.fabric.ordered,
            number=next(self._numbers),
            verifies=CHECKSUM,
        )
        address = self._prefill_address(NOWHERE if self.world.routers.random() < MISTAKEN else "host-of-P")
        self.task(lambda: self.open_loads.register(registration, address, {}, self.world.now))

    def refuse(self, prompt: Prompt, prefill_request_id: str | None) -> None:
        """D computes the prompt itself."""
        names = self.world.new_id(prompt.base), self.engine_id, prefill_request_id, prompt.text
        self.task(lambda: self.open_loads.decline(self._prefill_address(), Decline(*names)))

    def _prefill_address(self, host: str = "host-of-P") -> Address:
        return Address("P", host, 5000, self.world.ranks, notify_only=True)

    def abort(self, load: Load) -> None:
        """The scheduler keeps the blocks until the worker reports the load's end."""
        load.aborted = True
        self.turns.handle(load.request_id, turn_protocol.Finished())
        self.postponed.request_finished(load.request_id)
        self.task(lambda: self.open_loads.abort(load.request_id, "aborted", self.world.now))

    def _expire(self, load: Load) -> None:
        load.overdue = True
        self.task(lambda: self.open_loads.time_out(load.request_id, "overdue", self.world.now))

    # layerpush.compat.push_worker.VllmPushWorker

    def knows(self, request_id: str) -> bool:
        return request_id in self.loads

    def mismatch(self, engine_id: str) -> None:
        """The engines fit each other."""

    def clock_offset(self, engine_id: str) -> None:
        """The clocks were not compared."""

    def loaded(self, completions: Sequence[bytes]) -> None:
        messages = [read(completion) for completion in completions]
        assert all(isinstance(message, Completion) for message in messages)
        load = self.loads[messages[0].request_id]
        assert len(messages) == self.world.ranks, "one completion of each prefill rank"
        assert not load.aborted or load.outcome is None
        is_compared = (self.engine_id, load.request_id) not in self.world.whole_pushes
        is_right = self._holds(load, load.blocks)
        assert is_right or (load.damaged and not is_compared), f"{load} was reported complete over wrong bytes"
        assert (load.first_token is None) == (load.sampling is None), f"{load} lacks its answer, or did not ask"
        self.postponed.load_ended(load.request_id)
        self._end(load, "loaded")

    # News to the scheduler.

    def _reported(self, news: LoadNews) -> None:
        if isinstance(news, RequestNews) and self.loads[news.request_id].aborted:
            return
        match news:
            case LoadToken():
                self._first_token(news.request_id, news.token)
            case LoadQueued():
                self.postponed.load_queued(news.request_id, news.computed)
            case LoadUnregistered():
                self.postponed.load_unregistered(news.request_id, 0)
            case LoadParked():
                self._parked(news.request_id)
            case LoadKept():
                self._keeps(news.request_id, news.tokens)
            case LoadCleared():
                self._cleared(news.request_id)
            case LoadCompleted():
                assert news.at is not None

    def _first_token(self, request_id: str, first_token: int | Missing) -> None:
        load = self.loads[request_id]
        assert load.sampling is not None, f"{load} did not ask"
        assert load.first_token is None, f"{load} gets a second first token"
        fits = load.sampling == SAMPLING and first_token == load.prompt.first_token
        assert fits or not isinstance(first_token, int), f"{load} gets the wrong token {first_token}"
        assert first_token != "other_sampling" or load.sampling != SAMPLING
        load.first_token = first_token
        self.world.tokens["token" if fits else str(first_token)] += 1

    def failed(self, request_id: str) -> None:
        assert self.loads[request_id].first_token is None, "a failed load has no first token"
        load = self.loads[request_id]
        again = self.postponed.load_ended(request_id)
        self._end(load, "unregistered" if again else "failed")
        if again:
            self._wait(replace(load.waiting, attempt=load.waiting.attempt + 1), first=True)

    def _parked(self, request_id: str) -> None:
        load = self.loads[request_id]
        assert load.outcome is None
        assert not load.parked
        load.parked = True

    def _keeps(self, request_id: str, tokens: int) -> None:
        """The prefix cache has these blocks from now on, whatever becomes of the others."""
        load = self.loads[request_id]
        assert load.outcome is None
        if not tokens:
            return
        assert tokens % BLOCK_SIZE == 0
        assert 0 < tokens < load.prompt.tokens
        load.kept = tokens // BLOCK_SIZE - (load.prompt.blocks - len(load.blocks))
        assert load.kept > 0, "D has them already"
        if not self._holds(load, load.blocks[: load.kept]):
            self.accuse(f"{load} keeps wrong bytes")
        self.world.kept_blocks += load.kept

    def damage(self, load: Load, layer: int, token: int, head: int) -> None:
        """The engine overwrites a byte of a load that is under way. ``token`` counts from the first one that it loads.

        Bytes behind the prompt's last token may be anything.
        """
        load.damaged = True
        block, place = divmod(token, BLOCK_SIZE)
        at = (layer * D_BLOCKS + load.blocks[block]) * BLOCK_BYTES
        self.memory[at + head * BLOCK_SIZE + place] ^= 1

    @property
    def damageable(self) -> list[Load]:
        """Loads of which no rank of P has written everything: what follows is compared, unless it is pushed whole."""
        sessions = {request_id: load.session for request_id, load in self.open_loads._open.items()}
        return [
            load
            for request_id, load in self.loads.items()
            if load.outcome is None and (session := sessions.get(request_id)) is not None and session.landed == 0
        ]

    def _cleared(self, request_id: str) -> None:
        load = self.loads[request_id]
        assert load.parked
        load.parked = False
        if load.outcome is not None:
            self._give_away(load)

    # A turn.

    def turn(self) -> None:
        for load in list(self.loads.values()):
            if load.outcome is None and not load.overdue and self.world.now >= load.deadline:
                self._expire(load)
        if self.loads and self.world.routers.random() < HEARTBEAT:
            self.handshake(self._prefill_address())  # vLLM connects by itself, for a heartbeat
        if self.world.prefill is not None and not self.world.prefill.frozen:
            asked = [each.prompt.base for each in (*self.queue, *self.loads.values())]
            self.world.prefill.extend_leases(set(asked))
        super().turn()
        self.schedule()
        self.connections.tick(self.world.now)
        self.open_loads.tick(self.world.now)

    def take(self, sender: str, message: Message, payload: bytes) -> None:
        if isinstance(message, Pong):
            self.open_loads.on_pong(sender, self.world.now)
        else:
            assert isinstance(message, LoadMessage)
            self.open_loads.on_message(sender, message, payload, self.world.now)

    def _end(self, load: Load, outcome: str) -> None:
        assert load.outcome is None, f"{load} is reported again, as {outcome}"
        load.outcome = outcome
        self.world.outcomes[outcome] += 1
        counted = self.turns.handle(load.request_id, turn_protocol.LoadEnded(outcome != "loaded"))
        self.world.returned += len(counted)
        if not load.parked:
            self._give_away(load)
        elif load.kept:
            load.given = load.kept
            self._free(load.blocks[: load.given])

    def _give_away(self, load: Load) -> None:
        self._free(load.blocks[load.given :])
        del self.loads[load.request_id]

    def _free(self, blocks: list[int]) -> None:
        """The engine computes here from now on."""
        ids = set(self._ids(blocks))
        self.check_blocks(ids, "are given away")
        for owned in self.caches:
            owned.give_away(ids)
        for index in ids:
            self.memory[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES] = POISON
        self.pool.give_back(blocks)

    # WRITEs on their way here.

    def on_the_wire(self) -> Iterator[FakeWrite]:
        """WRITEs that may still land, in whole or in part."""
        for write in self.world.fabric.writes:
            moves = write.source.alive or write.lingers
            if write.is_on_the_wire and moves and write.target is self.endpoint:
                yield write

    def check_blocks(self, ids: AbstractSet[int], deed: str, key: Hashable = None) -> None:
        """No WRITE is on its way into these blocks; with ``key``, none by that descriptor list."""
        for write in self.on_the_wire():
            into = write.route.remote_descriptors
            if key in (None, into) and ids & set(write.remote.tolist()):
                self.accuse(f"blocks {sorted(ids)} {deed} while {write} is on its way into them")

    def check_post(self, key: Hashable, ids: Sequence[int]) -> None:
        """No WRITE is posted into memory that another WRITE uses."""
        self.check_blocks(set(ids), "are written to again", key)

    def blocks_of_others(self, replica: Replica, ids: Sequence[int]) -> set[int]:
        """The blocks among these descriptors that another rank of P is to send."""
        blocks = {index % D_BLOCKS for index in ids}
        loads = self.loads.values()
        places = {block: place for load in loads for place, block in enumerate(load.blocks) if place >= load.given}
        return {block for block in blocks if block in places and not replica.owns(places[block])}

    def _ids(self, blocks: list[int]) -> list[int]:
        return [layer * D_BLOCKS + block for layer in range(LAYERS) for block in blocks]

    def _holds(self, load: Load, blocks: list[int]) -> bool:
        """Whether ``blocks``, the first of the load's, hold its prompt's KV."""
        first = load.prompt.blocks - len(load.blocks)
        return all(
            load.prompt.holds(
                layer, index, self.memory[(at := (layer * D_BLOCKS + block) * BLOCK_BYTES) : at + BLOCK_BYTES]
            )
            for layer in range(LAYERS)
            for index, block in enumerate(blocks, first)
        )

    def assert_idle(self) -> None:
        super().assert_idle()
        assert not self.loads
        assert not self.queue
        assert len(self.pool.free) == self.pool.size - 1
        assert len(self.open_loads) == 0
        assert not self.open_loads._early
        assert not self.open_loads._outcomes
        assert len(self.watch) == 0


class _Checks(Checks):
    """Only a damaged load differs from P's KV."""

    def __init__(self, engine: DecodeEngine, parts: KvParts, recorder: Recorder) -> None:
        super().__init__(parts, recorder)
        self._engine = engine

    def difference(
        self, registration: Registration, tokens: int, sums: Sequence[PartSums], record: LoadRecord
    ) -> str | None:
        found = super().difference(registration, tokens, sums, record)
        load = self._engine.loads[registration.request_id]
        if found is not None:
            self._engine.world.mismatches += 1
            if not load.damaged:
                self._engine.accuse(f"{load} is right: {found}")
        return found

    def _not_compared(self, registration: Registration, error: Exception) -> None:
        self._engine.accuse(f"{registration.request_id} is not compared: {error}")
