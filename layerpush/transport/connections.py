"""The engines that this worker is connected to, or is connecting to. Writer thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from layerpush.core.hosts import host_allowed
from layerpush.core.liveness import Verdict
from layerpush.telemetry.defects import logged
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.base import Transport, TransportError
from layerpush.transport.peers import Address, Handshake, Peer, Peers, Rank

logger = logging.getLogger(f"vllm.{__name__}")

RETRY_S = 1.0
TRIES = 3
WAITING_KEPT = 4096
MAX_DOUBTS = 8
UNANSWERED = 2
"""Questions to the connected process that have no answer when another process gets its name."""
FIRST: Rank = (0, 0)
LOST = "the connection to the decode engine was lost"
DROPPED = "the connection to the decode engine was dropped"

Then = Callable[[str | None, float], None]
"""Called with the reason of a failure, or None, and the time."""
Probe = Callable[[str, Rank, Address, Callable[[Verdict, float], None]], None]
"""Ask an engine's side channel about the agent of one of its ranks. The callback gets the verdict and its time, on the
writer thread."""
Search = Callable[[Address, Callable[[bytes], None]], None]
"""Ask an engine's side channel for the contact of each of its ranks. The callback gets each one that is found, on the
writer thread."""


class Caller(NamedTuple):
    """A ``reach`` that waits until it is known who lives at its address."""

    address: Address
    then: Then
    tries: int


class Network(Protocol):
    """The worker, as far as connections use it. Writer thread, but for ``task``.

    It notes the handshake of each peer: vLLM starts some by itself, for its heartbeats.
    """

    peers: Peers

    def handshake(self, address: Address) -> Handshake | None:
        """Start a handshake, or join one that runs; None when the engine is connected."""

    def engines(self) -> list[str]:
        """The ids of the connected engines."""

    def agents_of(self, engine_id: str) -> Mapping[str, Rank]:
        """The NIXL agents of a connected engine's ranks that this rank talks to; none if it is not connected."""

    def end_pushes(self, engine_id: str, reason: str) -> bool:
        """Fail the pushes to an engine. Returns whether no WRITE is on its way to it."""

    def has_writes_to(self, engine_id: str) -> bool:
        """Whether a WRITE is on its way to an engine of this id."""

    def disconnect(self, engine_id: str) -> None:
        """Forget an engine's agents and descriptors. No WRITE to it may be in flight."""

    def retire(self, engine_id: str) -> Callable[[], None]:
        """Forget an engine, so that another process may be connected under its id. WRITEs in flight go on, and its
        agents can be notified, until the result is called.
        """

    def task(self, task: Callable[[], None]) -> None:
        """Queue a task for the writer thread. Any thread."""


@dataclass(slots=True)
class _Retry:
    due: float
    attempt: Callable[[], None]


@dataclass(slots=True)
class _Retired:
    """The agents of a process whose name another one has, and how to forget them."""

    engine_id: str
    agents: frozenset[str]
    release: Callable[[], None]


class Connections:
    """Connects, reconnects, sends to every rank of an engine, and drops connections.

    ``on_lost`` gets the agents of an engine whose connection turns out to be gone, ``on_closed`` the id of an engine
    whose connection was closing and is dropped; both get the time. ``needs`` returns whether an agent may still have to
    be notified.

    An engine's name is no address: two processes may have one name, or the second one replaces the first. If an engine
    is connected, and somebody names another address of it, the side channels there and at the connection's address
    decide. The connected process lives at both: they are one. A process of that name answers there, and the connected
    one does not answer: its connection is retired, and the other is connected. Both answer: the caller gets the reason.
    No process of that name answers there: the connection counts.
    """

    def __init__(
        self,
        network: Network,
        transport: Transport,
        allowed_hosts: Iterable[str] | None,
        search: Search,
        probe: Probe,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.peers = network.peers
        self._network = network
        self._transport = transport
        self._search = search
        self._probe = probe
        self._clock = clock
        self._allowed_hosts = None if allowed_hosts is None else tuple(allowed_hosts)
        self._retries: list[_Retry] = []
        self._closing: dict[str, Peer] = {}
        """The peers whose connection is closing: an index."""
        self._doubts: dict[Address, list[Caller]] = {}
        """Addresses that are asked who lives there, and the callers that wait for the answer."""
        self._retired: list[_Retired] = []
        self._waiting = 0
        """Broadcasts that wait for a handshake."""
        self._peer_errors = PeerErrors(logger)
        self.on_lost: Callable[[Collection[str], float], None] = lambda _, __: None
        self.on_closed: Callable[[str, float], None] = lambda _, __: None
        self.needs: Callable[[str], bool] = lambda _: False

    def engines(self) -> dict[str, tuple[str, ...]]:
        """The agents of each connected engine, by its id."""
        return {engine_id: tuple(self.agents(engine_id)) for engine_id in self._network.engines()}

    def agents(self, engine_id: str) -> Mapping[str, Rank]:
        """The agents of a connected engine's ranks that this rank talks to; none if it is not connected."""
        return self._network.agents_of(engine_id)

    def is_connecting(self, engine_id: str) -> bool:
        """Whether a handshake with the engine runs that ``reach`` has asked for."""
        running = self._handshake(engine_id)
        return running is not None and running.is_awaited and not self.agents(engine_id)

    @property
    def allows_any_host(self) -> bool:
        """Whether any host may be connected to."""
        return self._allowed_hosts is None

    def address(self, engine_id: str) -> Address | None:
        """The address of a connected engine: a handshake there has shown that it is this engine. Another address that
        somebody asked for proves nothing.
        """
        handshake = self._handshake(engine_id) if self.agents(engine_id) else None
        return None if handshake is None else handshake.address

    def is_elsewhere(self, address: Address) -> bool:
        """Whether the engine is connected, and this is no address at which the connected process was found."""
        handshake = self._handshake(address.engine_id) if self.agents(address.engine_id) else None
        if handshake is None or handshake.address.is_at(address):
            return False
        return handshake.alias is None or not handshake.alias.is_at(address)

    def found_at(self, address: Address) -> None:
        """The connected process lives at this address."""
        handshake = self._handshake(address.engine_id)
        if handshake is not None and self.is_elsewhere(address):
            handshake.alias = address

    def is_retired(self, agent: str) -> bool:
        """Whether this agent's connection is retired: it can be notified."""
        return any(agent in retired.agents for retired in self._retired)

    def reach(self, address: Address, then: Then, now: float, tries: int = TRIES) -> None:
        """Connect unless connected, then call ``then``; after ``tries`` failures with the reason of the last one.

        An address that joins a connection must agree on the engine's number of ranks. It may name another host: see the
        class.
        """
        if not host_allowed(address.host, self._allowed_hosts):
            then(f"host {address.host!r} of engine {address.engine_id!r} is not in allowed_hosts", now)
            return
        try:
            running = self._network.handshake(address)
        except Exception as error:  # noqa: BLE001  vLLM's clean-up of stale engines may fail; so does this attempt
            self._over(address, then, tries, _reason(error))
            return
        if running is None:
            self._share(Caller(address, then, tries), now)
            return
        running.is_awaited = True

        def done(future: Future[Any]) -> None:
            error = future.exception()
            reason = None if error is None else _reason(error)
            self._network.task(partial(self._over, address, then, tries, reason, running.address))

        running.pending.add_done_callback(done)

    def broadcast(
        self, address: Address, payload: bytes, now: float, otherwise: Callable[[], bool] = lambda: False
    ) -> None:
        """Send a notification to every rank of an engine, connecting first if need be.

        If the connection turns out to be gone, it is ``lost``. The peer repeats its message if it still waits.
        If no handshake succeeds, ``otherwise`` may send the notification. It returns whether it has.

        While ``WAITING_KEPT`` others wait for a handshake, it is dropped: anybody can name engines to answer.
        """
        if self._waiting >= WAITING_KEPT and not self.agents(address.engine_id):
            self._unanswered(address, f"{WAITING_KEPT} other messages wait for a handshake", now)
            return

        def send(error: str | None, at: float) -> None:
            self._waiting -= 1
            if error is not None:
                if not otherwise():
                    self._unanswered(address, error, at)
                return
            reached = [self.notify(agent, payload) for agent in self.agents(address.engine_id)]
            if not all(reached):
                self.lost(address.engine_id)

        self._waiting += 1
        self.reach(address, send, now, tries=1)

    def _unanswered(self, address: Address, reason: str, now: float) -> None:
        self._peer_errors.count("unanswered", f"cannot answer engine {address.engine_id}: {reason}", now)

    def notify_unconnected(self, contact: bytes, payload: bytes) -> bool:
        """Send to an agent without a handshake; False if that is impossible."""
        try:
            return self.notify(self._transport.meet(contact), payload)
        except TransportError as error:
            logger.debug("cannot notify an agent without a handshake: %s", error)
            return False

    def notify_by_search(self, address: Address, *payloads: bytes) -> bool:
        """Send to every rank of an engine without a handshake, once its side channel has named the rank's contact.

        False if that is impossible: ``allowed_hosts`` lacks the host.
        """
        if not host_allowed(address.host, self._allowed_hosts):
            return False

        def found(contact: bytes) -> None:
            for payload in payloads:
                self.notify_unconnected(contact, payload)

        self._search(address, found)
        return True

    def notify(self, agent: str, payload: bytes) -> bool:
        """Send to one agent; False if its connection is gone, or we never had one."""
        try:
            self._transport.notify(agent, payload)
        except TransportError as error:
            logger.debug("cannot notify %s: %s", agent, error)
            return False
        return True

    # The end of a connection.

    def forget(self, engine_id: str) -> bool:
        """Fail the pushes to an engine and drop its connection; the next ``reach`` makes a new one. False if WRITEs are
        on their way over it: then it is closing.
        """
        if self._network.end_pushes(engine_id, DROPPED):
            self._network.disconnect(engine_id)
            return True
        self.close(engine_id, LOST)
        return False

    def lost(self, engine_id: str) -> None:
        """The connection to an engine turns out to be gone: it closes, and the engine's next message connects anew."""
        self.on_lost(self.agents(engine_id), self._clock())
        self.close(engine_id, LOST)

    def close(self, engine_id: str, reason: str) -> None:
        """The engine may be gone. Its pushes fail, and its connection is dropped as soon as no WRITE is on its way."""
        peer = self.peers[engine_id]
        peer.is_lost, peer.closing = True, peer.closing or reason
        self.peers.keep(peer)
        self._closing[engine_id] = peer

    def closing(self, engine_id: str) -> str | None:
        """The reason why the connection to this engine is closing; None if it is not."""
        peer = self._closing.get(engine_id)
        return None if peer is None else peer.closing

    # Time.

    def next_due(self, _now: float) -> float | None:
        """When ``tick`` has a handshake to repeat; None: never."""
        return min((retry.due for retry in self._retries), default=None)

    def tick(self, now: float) -> None:
        """Drop connections that can be dropped by now; repeat the handshakes that are due."""
        for engine_id, peer in list(self._closing.items()):
            if self._network.end_pushes(engine_id, peer.closing or LOST):
                del self._closing[engine_id]
                peer.closing = None
                self._network.disconnect(engine_id)
                self.on_closed(engine_id, now)
        for retired in list(self._retired):
            if not any(map(self.needs, retired.agents)) and not self._network.has_writes_to(retired.engine_id):
                self._retired.remove(retired)
                retired.release()
        for retry in [each for each in self._retries if each.due <= now]:
            self._retries.remove(retry)  # one by one: a defect in one attempt must not cost the others
            retry.attempt()

    # One name, two addresses.

    def _share(self, caller: Caller, now: float) -> None:
        """The engine is connected, but for a caller whose handshake was too late."""
        address = caller.address
        if address in self._doubts:
            self._doubts[address].append(caller)
        elif not self.is_elsewhere(address):
            caller.then(_disagreement(self.address(address.engine_id), address), now)
        elif len(self._doubts) < MAX_DOUBTS:
            self._doubts[address] = [caller]
            agents = self.agents(address.engine_id)
            self._ask(address, min(agents, key=agents.__getitem__), None)
        else:
            text = f"{MAX_DOUBTS} other addresses of connected engines are asked who lives there"
            caller.then(f"engine {address.engine_id!r} is connected at another address, and {text}", now)

    def _ask(self, address: Address, agent: str, rank: Rank | None) -> None:
        """Ask who lives at an address. ``rank``: None for the agent's own."""
        asked = rank or self.agents(address.engine_id)[agent]
        self._probe(agent, asked, address, partial(self._on_claimant, address, agent, asked))

    def _on_claimant(self, address: Address, agent: str, rank: Rank, verdict: Verdict, now: float) -> None:
        agents, found = self.agents(address.engine_id), self.address(address.engine_id)
        if agent not in agents or found is None:
            self._resume(address, now)
        elif verdict.lives:
            self.found_at(address)
            self._resume(address, now)
        elif verdict is Verdict.REPLACED:
            self._probe(agent, agents[agent], found, partial(self._on_incumbent, address, agent, UNANSWERED))
        elif verdict is Verdict.ENDED and rank != FIRST:  # another process may have fewer ranks
            self._ask(address, agent, FIRST)
        else:
            self._answer(address, lambda caller: caller.then(_disagreement(found, caller.address), now))

    def _on_incumbent(self, address: Address, agent: str, left: int, verdict: Verdict, now: float) -> None:
        agents, found = self.agents(address.engine_id), self.address(address.engine_id)
        if agent not in agents or found is None:
            self._resume(address, now)
        elif verdict.lives:
            self._answer(address, lambda caller: caller.then(two_engines(found, address), now))
        elif verdict is Verdict.UNKNOWN and left > 1:  # it may be busy
            self._probe(agent, agents[agent], found, partial(self._on_incumbent, address, agent, left - 1))
        else:
            try:
                self._retire(found, address, now)
            except Exception as error:  # the callers wait for nothing else: they get it
                logger.exception("layerpush: engine %s could not be dropped", address.engine_id)
                reason = f"engine {address.engine_id!r} could not be dropped: {type(error).__name__}: {error}"
                self._answer(address, lambda caller: caller.then(reason, now))
            else:
                self._resume(address, now)

    def _resume(self, address: Address, now: float) -> None:
        self._answer(address, lambda caller: self.reach(caller.address, caller.then, now, caller.tries))

    def _answer(self, address: Address, answer: Callable[[Caller], None]) -> None:
        """Answer all that wait for a decision; a defect in one answer must not cost the others."""
        for caller in self._doubts.pop(address):
            with logged("the decision over an address", address.engine_id):
                answer(caller)

    def _retire(self, found: Address, address: Address, now: float) -> None:
        """The connected process of this name does not answer, and another one lives at ``address``. It gets no new push
        and no new registration. What may still come from it, or land there, keeps its agents until it ends.
        """
        engine_id, peer = address.engine_id, self.peers[address.engine_id]
        logger.warning(
            "layerpush: engine %s at %s:%d does not answer, and another process has its id at %s:%d: that one counts",
            engine_id,
            found.host,
            found.port,
            address.host,
            address.port,
        )
        peer.is_lost = True
        self._network.end_pushes(engine_id, DROPPED)
        agents = frozenset(self.agents(engine_id))
        self._retired.append(_Retired(engine_id, agents, self._network.retire(engine_id)))
        self._closing.pop(engine_id, None)
        peer.closing = None
        self.on_closed(engine_id, now)

    def _handshake(self, engine_id: str) -> Handshake | None:
        peer = self.peers.get(engine_id)
        return None if peer is None else peer.handshake

    def _over(self, address: Address, then: Then, tries: int, error: str | None, shared: Address | None = None) -> None:
        """A handshake is over; ``shared`` is the address at which it was begun, if it did begin."""
        now, tried = self._clock(), shared or address
        if error is None:
            self._share(Caller(address, then, tries), now)
            return
        if tries <= 1:
            then(f"no handshake with engine {address.engine_id!r} at {tried.host}:{tried.port}: {error}", now)
            return
        if tried == address:
            due, left = now + RETRY_S, tries - 1
        else:  # at once, before another address is tried again
            due, left = now, tries
        self._retries.append(_Retry(due, lambda: self.reach(address, then, due, left)))


def _reason(error: BaseException) -> str:
    """vLLM asserts, without a text, that a side channel knows the rank that it is asked for."""
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else f"{name}; has it so many ranks? See tp_size and pp_size"


def two_engines(found: Address, other: Address) -> str:
    """The reason why the process at another address than the connected one's is not served."""
    return (
        f"two engines have the id {found.engine_id!r}: one lives at {found.host}:{found.port},"
        f" and another at {other.host}:{other.port}"
    )


def _disagreement(found: Address | None, asked: Address) -> str | None:
    """The reason why a connection cannot be shared with this address; None if it can, or if there is none any more."""
    if found is None:
        return None
    stages_agree = found.pp_size == asked.pp_size or not asked.has_stages
    if found.tp_size == asked.tp_size and stages_agree:
        return None
    return (
        f"engine {found.engine_id!r} is connected with tp_size {found.tp_size} and pp_size {found.pp_size},"
        f" not with {asked.tp_size} and {asked.pp_size}"
    )
