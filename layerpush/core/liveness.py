"""The liveness of prefill processes: the times of pings and probes, and the conclusions from them. Pure.

Times are in seconds, on the caller's clock.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Container
from dataclasses import dataclass, field


class Verdict(enum.Enum):
    """The result of a probe of an engine's side channel, for one of its agents."""

    ALIVE = "the side channel names this agent"
    SPEAKS_LAYERPUSH = "the side channel names this agent, and its engine runs layerpush"
    ENDED = "no process listens there, or another one answers: the process that could write is dead"
    REPLACED = "another process answers there, under the name of the agent's engine"
    UNKNOWN = "no answer, or an unreadable one: proves nothing"

    @property
    def lives(self) -> bool:
        """Whether the agent's engine has answered."""
        return self in (Verdict.ALIVE, Verdict.SPEAKS_LAYERPUSH)

    @property
    def ended(self) -> bool:
        """Whether the agent's process listens no more."""
        return self in (Verdict.ENDED, Verdict.REPLACED)


class PeerAction:
    """A task that the watch gives to its owner."""


@dataclass(frozen=True, slots=True)
class SendPing(PeerAction):
    """Ping the agent, or, if it is not known that it ``speaks_layerpush``, send it an empty heartbeat."""

    engine_id: str
    agent: str
    speaks_layerpush: bool


@dataclass(frozen=True, slots=True)
class StartProbe(PeerAction):
    """Ask the engine's side channel about the agent; `PeerWatch.probe_ended` follows."""

    engine_id: str
    agent: str


@dataclass(frozen=True, slots=True)
class ReportSilent(PeerAction):
    """Nothing comes from the agent: its loads get a `Silent`."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportGone(PeerAction):
    """The agent's process is dead: its loads get a `Gone`."""

    engine_id: str
    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reconnect(PeerAction):
    """The agent is alive but no message reaches it: forget the connection to its engine and make a new one."""

    engine_id: str
    agent: str


PROBE_GAP_S = 0.5
"""Minimum seconds between the two probes that prove an agent's end: a restarting listener refuses one, too."""
PROBE_LOST_S = 30.0
"""A probe that has no verdict after this time will never have one."""


@dataclass(slots=True)
class _Agent:
    """One prefill process: the number of sessions that await it, and its signs of life."""

    sessions: int
    heard_at: float
    ping_at: float
    probe_from: float
    """Do not probe it earlier."""
    speaks_layerpush: bool = False
    pinged_at: float | None = None
    """When the first unanswered ping was sent. Silence counts from then, so pauses of our own process do not count."""
    lost: bool = False
    """A send to it failed. Since then there is no new connection, and nothing has come from it over the old one."""
    cut: bool = False
    """We dropped the connection to it ourselves: that proves nothing."""
    ended_at: float | None = None
    """When a probe first found that it had ended."""
    silent: bool = False
    gone: bool = False
    unreported: bool = False
    """It is gone, and a `ReportGone` is due: the first, or another one for a new session."""


@dataclass(frozen=True, slots=True)
class _Probe:
    agent: str
    started_at: float


@dataclass(slots=True)
class _Engine:
    """The awaited agents of one engine, the probe that runs, and the agent that a `Reconnect` is due for."""

    agents: dict[str, _Agent] = field(default_factory=dict)
    probe: _Probe | None = None
    reconnects: str | None = None


class PeerWatch:
    """Watches the prefill processes from which loads are awaited.

    An agent is *gone* when all of this holds:

    - a send to it failed;
    - two probes found that it had ended, and the second began at least ``PROBE_GAP_S`` after the first was over;
    - nothing has come from it since the first probe began.

    Probes alone prove too little: with several ranks the listener lives in another process than the writer, and may die
    on its own.

    An agent *speaks layerpush* when it has sent a message that only layerpush sends, or when its side channel has said
    that layerpush runs it. Such an agent is *silent* when nothing has come from it for ``timeout_s``, in spite of pings
    for the last three quarters of it. Silence does not prove its death, and is reported once: no session may be added
    then. The pings go on, and any message ends it. Another agent never answers a ping, so it is probed.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._beat_s = timeout_s / 4
        self._pause_s = max(self._beat_s, PROBE_GAP_S)
        self._engines: dict[str, _Engine] = {}
        self._engine_of: dict[str, str] = {}
        """The engine of each agent: an index."""

    def __len__(self) -> int:
        return len(self._engine_of)

    def engine_of(self, name: str) -> str | None:
        """The engine of an agent that is watched."""
        return self._engine_of.get(name)

    def await_agents(
        self, engine_id: str, agents: Collection[str], now: float, speaks_layerpush: Container[str] = ()
    ) -> None:
        """Another session awaits something from these agents. Those in ``speaks_layerpush`` were known to do that."""
        for name in agents:
            agent = self._find(name)
            if agent is None:
                agent = _Agent(0, heard_at=now, ping_at=now + self._beat_s, probe_from=now)
                self._engine_of[name] = engine_id
                self._engines.setdefault(engine_id, _Engine()).agents[name] = agent
            agent.sessions += 1
            agent.speaks_layerpush |= name in speaks_layerpush
            agent.unreported = agent.gone

    def release_agents(self, engine_id: str, agents: Collection[str]) -> None:
        """A session that was added with these agents is over."""
        for name in agents:
            agent = self._find(name)
            if agent is None:
                continue
            agent.sessions -= 1
            if agent.sessions == 0:
                del self._engine_of[name], self._engines[engine_id].agents[name]
        if engine_id in self._engines and not self._engines[engine_id].agents:
            del self._engines[engine_id]

    def is_silent(self, name: str) -> bool:
        """Whether this agent was reported as silent, and nothing has come from it since."""
        agent = self._find(name)
        return agent is not None and agent.silent

    def on_message(self, name: str, now: float, speaks_layerpush: bool) -> None:
        """A message came from this agent; ``speaks_layerpush``: only layerpush sends such a message."""
        agent = self._find(name)
        if agent is not None and not agent.gone:
            agent.heard_at, agent.pinged_at, agent.ended_at = now, None, None
            agent.speaks_layerpush |= speaks_layerpush
            agent.silent = False
            agent.lost = agent.lost and agent.cut  # without a connection no send could fail and set it again

    def send_failed(self, name: str, now: float) -> None:
        """A send to this agent failed: it is probed at once, unless a probe ended just now."""
        agent = self._find(name)
        if agent is not None and not agent.lost:
            agent.lost = True
            if agent.ended_at is not None:
                agent.probe_from = min(agent.probe_from, max(now, agent.ended_at + PROBE_GAP_S))

    def connection_dropped(self, name: str) -> None:
        """There is no connection to this agent, because we dropped it: it is probed, and connected anew if it lives."""
        agent = self._find(name)
        if agent is not None:
            agent.cut = True

    def reconnected(self, agents: Collection[str]) -> None:
        """There is a new connection to these agents: failures of the old one no longer count."""
        for name in agents:
            agent = self._find(name)
            if agent is not None and not agent.gone:
                agent.lost = agent.cut = False

    def probe_ended(self, engine_id: str, name: str, verdict: Verdict, now: float) -> None:
        """The result of a probe. One that is not awaited is ignored."""
        engine = self._engines.get(engine_id)
        if engine is None or engine.probe is None or engine.probe.agent != name:
            return
        probe, engine.probe = engine.probe, None
        agent = engine.agents.get(name)
        if agent is None:
            return
        agent.probe_from = now + self._pause_s
        if verdict.ended and agent.heard_at < probe.started_at:
            self._ended(agent, probe, now)
            return
        agent.ended_at = None
        if not verdict.lives:
            return
        if agent.lost or agent.cut:
            engine.reconnects = name
        if not agent.speaks_layerpush:
            agent.heard_at = now  # no other sign of life comes from it
            if verdict is Verdict.SPEAKS_LAYERPUSH:  # it had heartbeats only, which need no answer
                agent.speaks_layerpush, agent.pinged_at, agent.ping_at = True, None, now

    def due(self, now: float) -> list[PeerAction]:
        """The actions that are due by ``now``; each is returned once."""
        actions: list[PeerAction] = []
        for engine_id, engine in self._engines.items():
            for name, agent in engine.agents.items():
                if agent.unreported:
                    agent.unreported = False
                    actions.append(ReportGone(engine_id, name, f"the process of prefill agent {name} has ended"))
                elif now >= self._silent_at(agent):
                    agent.silent = True
                    actions.append(
                        ReportSilent(name, f"nothing came from prefill agent {name} for {self._timeout_s:g} s")
                    )
                if not agent.gone and now >= agent.ping_at:
                    agent.ping_at = now + self._beat_s
                    agent.pinged_at = now if agent.pinged_at is None else agent.pinged_at
                    actions.append(SendPing(engine_id, name, agent.speaks_layerpush))
            if engine.reconnects in engine.agents:
                actions.append(Reconnect(engine_id, engine.reconnects))
            engine.reconnects = None
            probe_at, name = self._next_probe(engine)
            if now >= probe_at:
                engine.probe = _Probe(name, now)
                actions.append(StartProbe(engine_id, name))
        return actions

    def next_due(self, now: float) -> float | None:
        """When ``due`` will return an action if nothing happens until then; ``now`` if one is due already."""
        times: list[float] = []
        for engine in self._engines.values():
            times.append(self._next_probe(engine)[0] if engine.reconnects is None else now)
            for agent in engine.agents.values():
                times.append(now if agent.unreported else self._silent_at(agent))
                times.append(math.inf if agent.gone else agent.ping_at)
        soonest = min(times, default=math.inf)
        return None if soonest == math.inf else max(soonest, now)

    def _ended(self, agent: _Agent, probe: _Probe, now: float) -> None:
        agent.ping_at = now  # if it lives it answers, if not the send fails
        if agent.ended_at is None:
            agent.ended_at = now
            agent.probe_from = now + PROBE_GAP_S
        elif agent.lost and probe.started_at >= agent.ended_at + PROBE_GAP_S:
            agent.gone = agent.unreported = True

    def _silent_at(self, agent: _Agent) -> float:
        if agent.gone or agent.silent or not agent.speaks_layerpush or agent.pinged_at is None:
            return math.inf
        return agent.pinged_at + self._timeout_s - self._beat_s

    def _next_probe(self, engine: _Engine) -> tuple[float, str]:
        """The time of the engine's next probe, and its agent. One probe runs at a time."""
        not_before = -math.inf if engine.probe is None else engine.probe.started_at + PROBE_LOST_S
        wanted = [
            (max(not_before, agent.probe_from, self._doubted_at(agent)), name)
            for name, agent in engine.agents.items()
            if not agent.gone
        ]
        return min(wanted, default=(math.inf, ""))

    def _doubted_at(self, agent: _Agent) -> float:
        in_trouble = agent.lost or agent.cut or agent.ended_at is not None
        return -math.inf if in_trouble else agent.heard_at + self._timeout_s / 2

    def _find(self, name: str) -> _Agent | None:
        engine_id = self._engine_of.get(name)
        return None if engine_id is None else self._engines[engine_id].agents[name]
