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
from layerpush.transport.connections import Address, Connections, Handshake, Rank


class FakeNetwork:
    """``listening``: engines whose handshakes succeed at once, and their agents.

    An engine that a test puts into ``connected`` has the address that the test puts into ``addresses``, or none.
    """

    def __init__(self) -> None:
        self.listening: dict[str, tuple[str, ...]] = {}
        self.connected: dict[str, tuple[str, ...]] = {}
        self.handshakes: list[Address] = []
        self.broken: Exception | None = None
        self.forgotten: list[str] = []
        self.tasks: deque[Callable[[], None]] = deque()
        self.addresses: dict[str, Address] = {}
        self._pending: dict[str, Handshake] = {}

    def handshake(self, address: Address) -> Handshake | None:
        if self.broken is not None:
            raise self.broken
        if address.engine_id in self.connected:
            return None
        if address.engine_id not in self._pending:
            self.handshakes.append(address)
            self._pending[address.engine_id] = Handshake(Future(), address)
            if address.engine_id in self.listening:
                self.answer(address.engine_id, *self.listening[address.engine_id])
                return self._answered
        return self._pending[address.engine_id]

    def answer(self, engine_id: str, *agents: str) -> None:
        """The handshake succeeds. Its callers run as tasks."""
        self.connected[engine_id] = agents
        self._answered = self._pending.pop(engine_id)
        self.addresses[engine_id] = self._answered.address
        self._answered.pending.set_result(None)

    def reject(self, engine_id: str, error: Exception) -> None:
        self._pending.pop(engine_id).pending.set_exception(error)

    def engines(self) -> dict[str, tuple[str, ...]]:
        return dict(self.connected)

    def agents_of(self, engine_id: str) -> tuple[str, ...]:
        return self.connected.get(engine_id, ())

    def rank_of(self, engine_id: str, agent: str) -> Rank | None:
        agents = self.agents_of(engine_id)
        return (0, agents.index(agent)) if agent in agents else None

    def address_of(self, engine_id: str) -> Address | None:
        return self.addresses.get(engine_id) if engine_id in self.connected else None

    def disconnect(self, engine_id: str) -> None:
        self.forgotten.append(engine_id)
        self.connected.pop(engine_id, None)

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


class Town:
    """A network, its mail, its peers and a clock."""

    def __init__(self, allowed_hosts: tuple[str, ...] | None = None) -> None:
        self.now = 100.0
        self.network, self.probe, self.search = FakeNetwork(), FakeProbe(), FakeSearch()
        self.mail = FakeMail(lambda: chain.from_iterable(self.network.connected.values()))
        self.peers = Connections(self.network, self.mail, allowed_hosts, self.search, clock=lambda: self.now)

    def settle(self) -> None:
        """Does all work that waits only for the writer thread."""
        self.network.run()
        self.peers.tick(self.now)
        self.network.run()
