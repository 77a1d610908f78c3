"""One rank of a decode engine: its memory, and the real loads of its worker."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from layerpush.core.liveness import PeerWatch
from layerpush.core.wire import Completion, Message, PartSums, Pong, Registration, read
from layerpush.decode.checks import Checks
from layerpush.decode.early_messages import LoadMessage
from layerpush.decode.loads import Loads
from layerpush.decode.outcomes import Outcomes
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.kv_parts import KvParts
from tests.support.fake_transport import Descriptors, FakeWrite
from tests.unit.both_sides.process import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    D_BLOCKS,
    HEADS,
    LAYERS,
    POISON,
    Process,
    kv_layers,
)

if TYPE_CHECKING:
    from tests.unit.both_sides.decode import DecodeEngine, Load
    from tests.unit.both_sides.world import World

PEER_TIMEOUT_S = 20.0
HEARTBEAT = 0.2
"""The probability that vLLM sends a heartbeat in a turn."""
HANDSHAKES_S, PAUSES = (0.0, 1.5, 4.0), (0.0, 0.3, 0.7)
"""Ranks other than the first one are slower: durations of a handshake, and shares of turns without work."""


class DecodeRank(Process):
    """Plays vLLM's worker. Ranks split every block by heads."""

    def __init__(self, world: World, engine: DecodeEngine, rank: int) -> None:
        super().__init__(world, engine.engine_id, rank, engine.size)
        self.engine, self.tp_rank, self.world_size = engine, rank, engine.size
        self.handshake_s = world.routers.choice(HANDSHAKES_S) if rank else 0.0
        self._pauses = world.routers.choice(PAUSES) if rank else 0.0
        piece = self._piece = BLOCK_BYTES // engine.size
        self.memory = np.full(LAYERS * D_BLOCKS * piece, POISON, np.uint8)
        self.watch = PeerWatch(PEER_TIMEOUT_S)
        self._caches: list[Descriptors] = []
        for pieces in (1, 2):
            for sender in (0, 1):  # P's; two ranks that hold the same may send the same block
                parts = max(1, pieces // engine.size)
                starts = range(sender % parts * piece // parts, self.memory.size, piece)
                self._caches.append(self.endpoint.describe((pieces, sender), self.memory, starts, piece // parts))
                self._caches[-1].give_away(range(len(starts)))
        recorder = Recorder()
        worker: Any = self
        peers = PrefillPeers(worker, self.connections, self.watch, self.probe, recorder)
        outcomes = Outcomes(worker, rank, partial(engine.reported, rank), TraceFile(None, self.name, rank), recorder)
        caches = torch.from_numpy(self.memory).view(LAYERS, D_BLOCKS, HEADS // engine.size, BLOCK_SIZE, 1)
        checks = _Checks(self, KvParts(kv_layers(caches, HEADS), rank, engine.size), recorder)
        self.open_loads = Loads(worker, PEER_TIMEOUT_S, peers, outcomes, self.peer_errors, checks)

    # layerpush.compat.push_worker.VllmPushWorker

    def knows(self, request_id: str) -> bool:
        return request_id in self.engine.loads

    def mismatch(self, engine_id: str) -> None:
        """The engines fit each other."""

    def clock_offset(self, engine_id: str) -> None:
        """The clocks were not compared."""

    def loaded(self, completions: Sequence[bytes]) -> None:
        messages = [read(completion) for completion in completions]
        assert all(isinstance(message, Completion) for message in messages)
        load = self.engine.loads[messages[0].request_id]
        assert len(messages) == max(1, self.world.ranks // self.size), "one completion of each prefill rank"
        is_compared = (self.engine_id, load.request_id) not in self.world.whole_pushes
        is_right = self.holds(load, load.blocks)
        assert is_right or (load.damaged and not is_compared), f"{load} was reported complete over wrong bytes"
        self.engine.load_ended(self.rank, load.request_id, loaded=True)

    def failed(self, request_id: str) -> None:
        self.engine.load_ended(self.rank, request_id, loaded=False)

    # A turn.

    def turn(self) -> None:
        if self.rank and self.world.routers.random() < self._pauses:
            return
        if not self.rank:
            self.engine.begin_turn()
        if self.engine.loads and self.world.routers.random() < HEARTBEAT:
            self.handshake(self.engine.prefill_address())  # vLLM connects by itself, for a heartbeat
        super().turn()
        if not self.rank:
            self.engine.schedule()
        self.connections.tick(self.world.now)
        self.open_loads.tick(self.world.now)

    def take(self, sender: str, message: Message, payload: bytes) -> None:
        if isinstance(message, Pong):
            self.open_loads.on_pong(sender, self.world.now)
        else:
            assert isinstance(message, LoadMessage)
            self.open_loads.on_message(sender, message, payload, self.world.now)

    # Memory, and WRITEs on their way here.

    def hand_to(self, blocks: list[int], owner: str) -> None:
        for owned in self._caches:
            owned.hand_to(_ids(blocks), owner)

    def give_away(self, blocks: list[int]) -> None:
        """The engine computes here from now on."""
        ids = set(_ids(blocks))
        self._check_blocks(ids, "are given away")
        for owned in self._caches:
            owned.give_away(ids)
        for index in ids:
            self.memory[index * self._piece : (index + 1) * self._piece] = POISON

    def check_post(self, key: Hashable, ids: Sequence[int]) -> None:
        """No WRITE is posted into memory that another WRITE uses."""
        self._check_blocks(set(ids), "are written to again", key)

    def _check_blocks(self, ids: AbstractSet[int], deed: str, key: Hashable = None) -> None:
        """No WRITE is on its way into these blocks; with ``key``, none by that descriptor list."""
        for write in self._on_the_wire():
            into = write.route.remote_descriptors
            if key in (None, into) and ids & set(write.remote.tolist()):
                self.accuse(f"blocks {sorted(ids)} {deed} while {write} is on its way into them")

    def _on_the_wire(self) -> Iterator[FakeWrite]:
        """WRITEs that may still land, in whole or in part."""
        for write in self.world.fabric.writes:
            moves = write.source.alive or write.lingers
            if write.is_on_the_wire and moves and write.target is self.endpoint:
                yield write

    def holds(self, load: Load, blocks: list[int]) -> bool:
        """Whether ``blocks``, the first of the load's, hold this rank's part of its prompt's KV."""
        first, head = load.prompt.blocks - len(load.blocks), self.rank * HEADS // self.world_size
        return all(
            load.prompt.holds(
                layer, index, self.memory[(at := (layer * D_BLOCKS + block) * self._piece) : at + self._piece], head
            )
            for layer in range(LAYERS)
            for index, block in enumerate(blocks, first)
        )

    def damage(self, layer: int, block: int, place: int) -> None:
        """The engine overwrites a byte."""
        self.memory[(layer * D_BLOCKS + block) * self._piece + place] ^= 1

    def assert_idle(self) -> None:
        super().assert_idle()
        assert len(self.open_loads) == 0
        assert not self.open_loads._early
        assert not self.open_loads._outcomes
        assert len(self.watch) == 0


def _ids(blocks: list[int]) -> list[int]:
    return [layer * D_BLOCKS + block for layer in range(LAYERS) for block in blocks]


class _Checks(Checks):
    """Only a damaged load differs from P's KV."""

    def __init__(self, rank: DecodeRank, parts: KvParts, recorder: Recorder) -> None:
        super().__init__(parts, recorder)
        self._rank = rank

    def difference(
        self, registration: Registration, tokens: int, sums: Sequence[PartSums], record: LoadRecord
    ) -> str | None:
        found = super().difference(registration, tokens, sums, record)
        load = self._rank.engine.loads[registration.request_id]
        if found is not None:
            self._rank.world.mismatches += 1
            if not load.damaged:
                self._rank.accuse(f"{load} is right: {found}")
        return found

    def _not_compared(self, registration: Registration, error: Exception) -> None:
        self._rank.accuse(f"{registration.request_id} is not compared: {error}")
