"""One worker process of an engine: its name on the wire, its connections, its handshakes and its probes."""

from __future__ import annotations

import logging
import random
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from layerpush.core.liveness import Verdict
from layerpush.core.prefixes import Prefixes
from layerpush.core.wire import Message, read
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.acknowledged import AcknowledgedTransport
from layerpush.transport.base import Transport, TransportError
from layerpush.transport.connections import Connections
from layerpush.transport.kv_parts import Field, LayerKv
from layerpush.transport.peers import Address, Handshake, Peers, Rank

if TYPE_CHECKING:
    from tests.support.fake_transport import Bytes
    from tests.unit.both_sides.world import World

LAYERS, BLOCK_BYTES, BLOCK_SIZE = 2, 8, 4
HEADS = BLOCK_BYTES // BLOCK_SIZE
"""KV heads of a layer, each with a byte for a token."""
P_BLOCKS, D_BLOCKS = 16, 12
EPOCHS = 2
"""Kinds of bytes that a prompt's epochs take turns to compute."""
POISON = 0xEE
SAMPLING = "greedy"
"""P's sampling parameters."""
HANDSHAKE_S, PROBE_S = 5.0, 2.0
NOWHERE = "nowhere"
"""An unreachable host that some requests name: handshakes and probes get no answer."""
UNKNOWN_S = 30.0
"""P's `unknown_request_timeout_s`."""


@dataclass(frozen=True)
class Prompt:
    """A client's prompt for both engines. ``base`` is its router's id; another prompt may have it too."""

    base: str
    text: str
    tokens: int

    @property
    def first_token(self) -> int:
        """The token that P samples after the prompt."""
        return zlib.crc32(self.text.encode()) % 1000

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_SIZE)

    def kv(self, layer: int, index: int, epoch: int = 0) -> Bytes:
        """The KV that attention leaves in a block. The next epoch computes other bytes, and they are as right."""
        seed = [*self.text.encode(), layer, index, epoch % EPOCHS]
        return np.random.default_rng(seed).integers(0, POISON, BLOCK_BYTES, dtype=np.uint8)

    def holds(self, layer: int, index: int, block: Bytes, first: int = 0) -> bool:
        """Whether a block has this KV, of heads from ``first`` on. P's ranks may write them in other epochs."""
        heads = block.reshape(-1, BLOCK_SIZE)
        known = [self.kv(layer, index, epoch).reshape(HEADS, -1) for epoch in range(EPOCHS)]
        return all(any(np.array_equal(head, each[at]) for each in known) for at, head in enumerate(heads, first))


class Turn(Prompt):
    """A turn that P keeps, or the first tokens of one, which a load asks for."""

    @property
    def prefixes(self) -> Prefixes:
        return Prefixes.of(random.Random(self.text).choices(range(1000), k=self.tokens), BLOCK_SIZE)


def kv_layers(caches: torch.Tensor, heads: int | None) -> dict[str, LayerKv]:
    """``caches`` by layer. ``heads`` of all ranks; None: each rank has all."""
    fields = (Field(1, 1),)
    return {f"layers.{layer}": LayerKv(cache, 0, 1, heads, fields) for layer, cache in enumerate(caches)}


def base_id(request_id: str) -> str:
    """An engine's own request id, without the suffix that it added."""
    return request_id.rpartition("-")[0]


@dataclass
class Pool:
    """Blocks of one engine. Block 0 has no owner. The oldest or the newest free block is used first."""

    size: int
    """The number of blocks, block 0 included."""
    free: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = deque(range(1, self.size))

    def take(self, count: int) -> list[int] | None:
        return [self.free.pop() for _ in range(count)] if count <= len(self.free) else None

    def give_back(self, blocks: list[int]) -> None:
        assert not set(blocks) & set(self.free)
        self.free.extend(blocks)


@dataclass(frozen=True)
class Asked:
    """A question to an engine's side channel about the agent of one of its ranks."""

    began: float
    agent: str
    rank: Rank
    address: Address
    on_verdict: Callable[[Verdict, float], None]


class Mail:
    """Notifications of a process. As in NIXL, they go to agents that it is connected to or has met."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._met: set[str] = set()

    def meet(self, contact: bytes) -> str:
        self._met.add(contact.decode())
        return contact.decode()

    def notify(self, agent: str, payload: bytes) -> None:
        if agent not in self._met and not any(agent in agents for agents in self._process.connected.values()):
            raise TransportError(f"{self._process.name} is not connected to {agent}")
        self._process.transport.notify(agent, payload)


class Process:
    """A `Network` for `Connections`. Nothing in it happens unless the process is given a turn."""

    handshake_s = 0.0
    """Seconds that a handshake takes at least."""

    def __init__(self, world: World, engine_id: str, rank: int, size: int) -> None:
        self.world, self.engine_id, self.rank, self.size = world, engine_id, rank, size
        self.name = world.new_name(engine_id, rank)
        self.endpoint = world.fabric.endpoint(self.name)
        self.transport: Transport = self.endpoint
        if not world.fabric.ordered:
            self.transport = AcknowledgedTransport(self.endpoint, clock=lambda: world.now)
        self.peer_errors = PeerErrors(logging.getLogger("vllm.layerpush.test"))
        self.connected: dict[str, tuple[str, ...]] = {}
        self.peers = Peers()
        self.handshakes: dict[str, tuple[float, Handshake]] = {}
        self.probes: list[Asked] = []
        self.tasks: deque[Callable[[], None]] = deque()
        self.connections = Connections(self, Mail(self), None, self._search, self.probe, clock=lambda: world.now)

    # layerpush.transport.connections.Network

    def handshake(self, address: Address) -> Handshake | None:
        if address.engine_id in self.connected:
            return None
        running = self.handshakes.setdefault(address.engine_id, (self.world.now, Handshake(Future(), address)))[1]
        self.peers[address.engine_id].handshake = running
        return running

    def engines(self) -> list[str]:
        return list(self.connected)

    def agents_of(self, engine_id: str) -> dict[str, Rank]:
        agents = self.connected.get(engine_id, ())
        return {agent: (0, rank) for rank, agent in enumerate(agents) if self._shares_heads(rank, len(agents))}

    def _shares_heads(self, rank: int, size: int) -> bool:
        """Whether this rank and one of another engine of ``size`` ranks have heads in common: vLLM connects only such
        ranks. An engine has one rank or two.
        """
        return self.world.equal_kv or size != self.size or rank == self.rank

    def end_pushes(self, engine_id: str, reason: str) -> bool:
        return True

    def has_writes_to(self, engine_id: str) -> bool:
        return False

    def retire(self, engine_id: str) -> Callable[[], None]:
        raise NotImplementedError  # each engine of this world has one address

    def disconnect(self, engine_id: str) -> None:
        self.connected.pop(engine_id, None)
        self.peers[engine_id].handshake = None

    def accuse(self, text: str) -> None:
        """Note a forbidden use of memory."""
        self.world.wrongs.append(f"{self.name}: {text}")

    def task(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def probe(self, agent: str, rank: Rank, address: Address, on_verdict: Callable[[Verdict, float], None]) -> None:
        self.probes.append(Asked(self.world.now, agent, rank, address, on_verdict))

    def _search(self, address: Address, on_contact: Callable[[bytes], None]) -> None:
        engine = self.world.engines.get(address.engine_id)
        for process in engine.processes if engine is not None and not engine.frozen else ():
            self.task(partial(on_contact, process.name.encode()))

    # A turn.

    def turn(self) -> None:
        self._end_handshakes()
        self._end_probes()
        for _ in range(len(self.tasks)):
            self.tasks.popleft()()
        for sender, payload in self.transport.notifications():
            self.take(sender, read(payload), payload)

    def take(self, sender: str, message: Message, payload: bytes) -> None:
        raise NotImplementedError

    def _end_handshakes(self) -> None:
        for engine_id, (began, handshake) in list(self.handshakes.items()):
            engine, nowhere = self.world.engines.get(engine_id), handshake.address.host == NOWHERE
            unanswered = nowhere or (engine is not None and engine.frozen)
            if self.world.now < began + (HANDSHAKE_S if unanswered else self.handshake_s):
                continue
            del self.handshakes[engine_id]
            if engine is None or unanswered:
                self.peers[engine_id].handshake = None
                handshake.pending.set_exception(ConnectionRefusedError() if engine is None else TimeoutError())
            else:
                self.connected[engine_id] = tuple(process.name for process in engine.processes)
                handshake.pending.set_result(None)

    def _end_probes(self) -> None:
        """A verdict holds for the moment of the answer."""
        for probe in list(self.probes):
            engine_id = probe.address.engine_id
            engine, nowhere = self.world.engines.get(engine_id), probe.address.host == NOWHERE
            unanswered = nowhere or (engine is not None and engine.frozen)
            if unanswered and self.world.now < probe.began + PROBE_S:
                continue
            self.probes.remove(probe)
            if unanswered and (nowhere or engine_id not in self.world.deaf):
                verdict = Verdict.UNKNOWN
            elif engine is None or engine_id in self.world.deaf:
                verdict = Verdict.ENDED
            else:
                known = engine.processes[probe.rank[1]].name == probe.agent
                verdict = Verdict.SPEAKS_LAYERPUSH if known else Verdict.ENDED
            probe.on_verdict(verdict, self.world.now)

    def assert_idle(self) -> None:
        assert not self.handshakes
        assert not self.probes
        assert not self.tasks
        assert not self.connections._retries
        assert not self.endpoint._live
        assert not [write for write in self.endpoint._released if write.target.alive]
