"""The prefill engines that loads are awaited from: sends to them, and their liveness. Writer thread only."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from layerpush.core import liveness
from layerpush.core.liveness import PeerWatch, Verdict
from layerpush.core.wire import Decline, PeerMessage, Ping, WireError, encode, encode_heartbeat, encode_quietly
from layerpush.decode import load_protocol
from layerpush.telemetry.defects import logged
from layerpush.telemetry.metrics.catalog import LOST_PEERS
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.transport.connections import Connections, Probe
from layerpush.transport.peers import Address, Rank

if TYPE_CHECKING:
    from layerpush.compat.push_worker import VllmPushWorker

logger = logging.getLogger(f"vllm.{__name__}")


class Awaited(Protocol):
    """A load, as far as its prefill engine's agents matter: those that have not answered yet are open."""

    address: Address
    ranks: dict[str, Rank]

    @property
    def open_agents(self) -> frozenset[str]: ...


class PrefillPeers:
    """Sends to agents, and performs the actions of ``PeerWatch``: pings, probes, reconnections."""

    def __init__(
        self,
        worker: VllmPushWorker,
        connections: Connections,
        watch: PeerWatch,
        probe: Probe,
        recorder: Recorder,
    ) -> None:
        self.connections = connections
        connections.on_lost = self._connection_lost
        connections.needs = lambda agent: watch.engine_of(agent) is not None
        self._worker = worker
        self._watch = watch
        self._probe = probe
        self._recorder = recorder
        self._pings = 0

    def decline(self, address: Address, message: Decline) -> None:
        """Report to every rank of a prefill engine, connected or not, that this engine will not load a request. One
        rank of this engine does. If the prefill engine cannot be reached, its lease ends.
        """
        if self._worker.tp_rank:
            return
        try:
            payload = encode_quietly(message)
        except WireError as error:  # P could not read the request's name
            logger.warning("layerpush: cannot decline %s: %s", message.request_id, error)
            return
        self.connections.notify_by_search(address, payload)

    # Agents.

    def on_message(self, agent: str, now: float, *, speaks_layerpush: bool) -> None:
        """A message came from an agent; ``speaks_layerpush``: only layerpush sends such a message."""
        self._watch.on_message(agent, now, speaks_layerpush)
        engine_id = self._watch.engine_of(agent)
        if speaks_layerpush and engine_id is not None:
            self.connections.peers[engine_id].speaks_layerpush.add(agent)

    def send(self, engine_id: str, agent: str, message: PeerMessage, now: float) -> None:
        """Send a message, in a form that stock engines ignore, unless layerpush is known to run the agent."""
        speaks_layerpush = agent in self.connections.peers[engine_id].speaks_layerpush
        self._send(engine_id, agent, encode(message) if speaks_layerpush else encode_quietly(message), now)

    def send_registration(self, engine_id: str, payload: bytes, now: float) -> frozenset[str]:
        """Send to every agent of a connected engine. Returns the agents that were reached."""
        agents = self.connections.agents(engine_id)
        reached = frozenset(agent for agent in agents if self.connections.notify(agent, payload))
        for agent in agents:
            if agent not in reached:
                self._watch.send_failed(agent, now)
        return reached

    def register_again(self, engine_id: str, agent: str, payload: bytes, now: float) -> None:
        """Repeat a registration, unless a stock engine may run the agent: it would push twice."""
        if agent in self.connections.peers[engine_id].speaks_layerpush:
            self._send(engine_id, agent, payload, now)

    def await_agents(self, engine_id: str, agents: Collection[str], now: float) -> None:
        """Another load awaits these agents."""
        peer = self.connections.peers[engine_id]
        peer.speaks_layerpush &= set(agents)  # others are of an earlier process
        self._watch.await_agents(engine_id, agents, now, peer.speaks_layerpush)  # the answer to the new one may be lost

    def release_agents(self, engine_id: str, agents: frozenset[str]) -> None:
        """A load that was added with these agents is over."""
        self._watch.release_agents(engine_id, agents)

    def silence(self, engine_id: str) -> str | None:
        """The reason why a connected engine gets no new load; None if it may get one. The blocks of its loads stay
        with it until it answers, so a vanished host costs the blocks of the loads before its silence, and no more.
        """
        for agent in self.connections.agents(engine_id):
            if self._watch.is_silent(agent):
                return f"prefill agent {agent} is silent, and earlier loads wait for it: no other load begins"
        return None

    def samples_otherwise(self, engine_id: str, request_id: str, parameters: tuple[str, ...]) -> None:
        """An engine has no first token for a request. ``parameters`` differ on it, if it names them. Logged once for
        each engine, and again when it names others.
        """
        peer = self.connections.peers[engine_id]
        if parameters and peer.other_sampling != parameters:
            peer.other_sampling = parameters
            self.connections.peers.keep(peer)
            logger.warning(
                "layerpush: prefill engine %s samples first tokens that this engine cannot use: its request for %s has "
                "other sampling parameters: %s",
                engine_id,
                request_id,
                ", ".join(parameters),
            )

    # Connections.

    def drop(self, engine_id: str) -> bool:
        """Drop the connection to an engine that loads are awaited from; False if it has to stay for now."""
        agents = list(self.connections.agents(engine_id))
        if not self.connections.forget(engine_id):
            return False
        for agent in agents:
            self._watch.connection_dropped(agent)
        return True

    def reconnected(self, engine_id: str) -> None:
        """There is a new connection to the engine."""
        self._watch.reconnected(self.connections.agents(engine_id))

    def _connection_lost(self, agents: Collection[str], now: float) -> None:
        """Another part of this rank found the connection to an engine broken, and will drop it. If the engine has
        several agents, it is not known which of them could not be reached.
        """
        for agent in agents:
            if len(agents) == 1:
                self._watch.send_failed(agent, now)
            self._watch.connection_dropped(agent)

    # Time.

    def tick(self, loads: Mapping[str, Awaited], now: float) -> Iterator[tuple[str, load_protocol.Event]]:
        """Perform the actions that are due, and yield agents' events. The caller handles each event before it takes the
        next, so that ``loads``, by request id, is current.
        """
        for action in self._watch.due(now):
            match action:
                case liveness.ReportSilent(agent, reason):
                    self._recorder.count(LOST_PEERS, "silent")
                    yield agent, load_protocol.AgentSilent(agent, reason)
                case liveness.ReportGone(engine_id, agent, reason):
                    self._recorder.count(LOST_PEERS, "gone")
                    yield agent, load_protocol.AgentGone(agent, reason)
                    with logged("the end of its connection", agent):
                        self._forget_dead_engine(engine_id, agent, loads)
                case _:
                    with logged(type(action).__name__, "none"):  # it comes again; the other actions do not
                        self._perform(action, loads, now)

    def _perform(self, action: liveness.PeerAction, loads: Mapping[str, Awaited], now: float) -> None:
        match action:
            case liveness.SendPing(engine_id, agent, speaks_layerpush):
                self._pings += 1
                ping = encode(Ping(self._worker.engine_id, self._pings)) if speaks_layerpush else encode_heartbeat(())
                self._send(engine_id, agent, ping, now)
            case liveness.StartProbe(engine_id, agent):
                self._start_probe(engine_id, agent, loads)
            case liveness.Reconnect(engine_id, agent):
                self._reconnect(engine_id, agent, loads, now)

    def next_due(self, now: float) -> float | None:
        """When ``tick`` will have something to do, unless an event comes first."""
        return self._watch.next_due(now)

    def _send(self, engine_id: str, agent: str, payload: bytes, now: float) -> None:
        """A send that fails is evidence that the agent is dead, unless we dropped the connection ourselves."""
        if agent not in self.connections.agents(engine_id) and not self.connections.is_retired(agent):
            self._watch.connection_dropped(agent)
        elif not self.connections.notify(agent, payload):
            self._watch.send_failed(agent, now)

    def _start_probe(self, engine_id: str, agent: str, loads: Mapping[str, Awaited]) -> None:
        load = next((load for load in loads.values() if agent in load.ranks), None)
        if load is not None:
            self._probe(agent, load.ranks[agent], load.address, partial(self._on_verdict, engine_id, agent))

    def _on_verdict(self, engine_id: str, agent: str, verdict: Verdict, now: float) -> None:
        self._watch.probe_ended(engine_id, agent, verdict, now)
        if verdict is Verdict.SPEAKS_LAYERPUSH:
            self.connections.peers[engine_id].speaks_layerpush.add(agent)

    def _reconnect(self, engine_id: str, agent: str, loads: Mapping[str, Awaited], now: float) -> None:
        """Unless another process has the name by now: the agent's loads wait on."""
        load = next((load for load in loads.values() if agent in load.ranks), None)
        agents = self.connections.agents(engine_id)
        if load is not None and (not agents or agent in agents) and self.drop(engine_id):
            self.connections.reach(load.address, partial(self._on_reconnected, engine_id), now, tries=1)

    def _on_reconnected(self, engine_id: str, error: str | None, _: float) -> None:
        if error is None:
            self.reconnected(engine_id)
        else:
            logger.warning("cannot reconnect to prefill engine %s: %s", engine_id, error)

    def _forget_dead_engine(self, engine_id: str, agent: str, loads: Mapping[str, Awaited]) -> None:
        """Only when none of its ranks may live: a send to a forgotten rank would fail, and that proves nothing."""
        agents = self.connections.agents(engine_id)
        if agent in agents and all(load.open_agents.isdisjoint(agents) for load in loads.values()):
            self.connections.forget(engine_id)
