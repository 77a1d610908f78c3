"""Engines to connect to, without a network: tests end the handshakes and read the messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

from layerpush.core.liveness import Verdict
from layerpush.core.wire import Message, read
from layerpush.transport.base import PeerLostError, TransportError
from layerpush.transport.connections import Connections
from layerpush.transport.peers import Address, Handshake, Peers, Rank


class FakeNetwork:
    """``listening``: engines whose handshakes succeed at once, and their agents. An engine that a test puts into
    ``connected`` has an address only by ``connect``. WRITEs are on their way to those in ``written_to``. ``retired``
    agents can be notified. ``end_pushes``: see ``Network``.
    """

    def __init__(self) -> None:
        self.peers = Peers()
        self.listening: dict[str, tuple[str, ...]] = {}
        self.connected: dict[str, tuple[str, ...]] = {}
        self.handshakes: list[Address] = []
        self.broken: Exception | None = None
        self.forgotten: list[str] = []
        self.retired: set[str] = set()
        self.written_to: set[str] = set()
        self.tasks: deque[Callable[[], None]] = deque()
        self.end_pushes: Callable[[str, str], bool] = lambda _, __: True

    def handshake(self, address: Address) -> Handshake | None:
        if self.broken is not None:
            raise self.broken
        if address.engine_id in self.connected:
            return None
        peer = self.peers[address.engine_id]
        if peer.handshake is None:
            self.handshakes.append(address)
            peer.handshake = Handshake(Future(), address)
            if address.engine_id in self.listening:
                self.answer(address.engine_id, *self.listening[address.engine_id])
        return peer.handshake

    def answer(self, engine_id: str, *agents: str) -> None:
        """The handshake succeeds. Its callers run as tasks."""
        self.connected[engine_id] = agents
        self._running(engine_id).pending.set_result(None)

    def reject(self, engine_id: str, error: Exception) -> None:
        running, self.peers[engine_id].handshake = self._running(engine_id), None
        running.pending.set_exception(error)

    def _running(self, engine_id: str) -> Handshake:
        handshake = self.peers[engine_id].handshake
        assert handshake is not None
        return handshake

    def connect(self, address: Address, *agents: str) -> None:
        """vLLM has connected an engine."""
        self.connected[address.engine_id] = agents
        self.peers[address.engine_id].handshake = Handshake(Future(), address)

    def engines(self) -> list[str]:
        return list(self.connected)

    def agents_of(self, engine_id: str) -> dict[str, Rank]:
        return {agent: (0, rank) for rank, agent in enumerate(self.connected.get(engine_id, ()))}

    def has_writes_to(self, engine_id: str) -> bool:
        return engine_id in self.written_to

    def retire(self, engine_id: str) -> Callable[[], None]:
        agents = self.connected[engine_id]
        self.retired |= set(agents)
        self.disconnect(engine_id)
        return lambda: self.retired.difference_update(agents)

    def disconnect(self, engine_id: str) -> None:
        self.forgotten.append(engine_id)
        self.connected.pop(engine_id, None)
        self.peers[engine_id].handshake = None

    def task(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def run(self) -> None:
        while self.tasks:
            self.tasks.popleft()()


class FakeMail:
    """A transport for notifications only; those to ``lost`` agents fail.

    As in NIXL, an agent must be ``connected`` to get any.
    """

    def __init__(self, connected: Callable[[], Iterable[str]]) -> None:
        self._connected = connected
        self._met: set[str] = set()
        self.sent: list[tuple[str, bytes]] = []
        self.lost: set[str] = set()
        self.unknown: set[str] = set()

    def notify(self, agent: str, payload: bytes) -> None:
        if agent in self.unknown or agent not in {*self._connected(), *self._met}:
            raise TransportError(f"no agent {agent}")
        if agent in self.lost:
            raise PeerLostError(f"agent {agent} is dead")
        self.sent.append((agent, payload))

    def meet(self, contact: bytes) -> str:
        if not contact.startswith(b"contact of "):
            raise TransportError("garbage")
        agent = contact.removeprefix(b"contact of ").decode()
        self._met.add(agent)
        return agent

    def taken(self) -> list[tuple[str, Message]]:
        """The messages since the last call."""
        sent, self.sent = self.sent, []
        return [(agent, read(payload)) for agent, payload in sent]


@dataclass
class Asked:
    """A probe that waits for its verdict."""

    agent: str
    rank: Rank
    address: Address
    on_verdict: Callable[[Verdict, float], None]


@dataclass
class FakeSearch:
    """``named`` has the contacts that each host's side channel names."""

    named: dict[str, tuple[bytes, ...]] = field(default_factory=dict)

    def __call__(self, address: Address, on_contact: Callable[[bytes], None]) -> None:
        for contact in self.named.get(address.host, ()):
            on_contact(contact)


@dataclass
class FakeProbe:
    asked: list[Asked] = field(default_factory=list)

    def __call__(self, agent: str, rank: Rank, address: Address, on_verdict: Callable[[Verdict, float], None]) -> None:
        self.asked.append(Asked(agent, rank, address, on_verdict))

    def answer(self, verdict: Verdict, now: float = 0.0) -> Asked:
        """Answers the oldest probe."""
        asked = self.asked.pop(0)
        asked.on_verdict(verdict, now)
        return asked


class FakePeers:
    """Engines to connect to, and our connections to them."""

    def __init__(self, allowed_hosts: tuple[str, ...] | None = None) -> None:
        self.now = 100.0
        self.network, self.probe, self.search = FakeNetwork(), FakeProbe(), FakeSearch()
        self.mail = FakeMail(lambda: chain(self.network.retired, *self.network.connected.values()))
        self.connections = Connections(
            self.network, self.mail, allowed_hosts, self.search, self.probe, clock=lambda: self.now
        )

    def asked(self, *verdicts: Verdict) -> list[tuple[str, Rank, Address]]:
        """The oldest probes get these verdicts. Returns their agents, ranks and addresses."""
        asked = [self.probe.answer(verdict, self.now) for verdict in verdicts]
        self.settle()
        return [(each.agent, each.rank, each.address) for each in asked]

    def settle(self) -> None:
        """Does all work that waits only for the writer thread."""
        self.network.run()
        self.connections.tick(self.now)
        self.network.run()
