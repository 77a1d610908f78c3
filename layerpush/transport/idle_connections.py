"""The connections that no push and no load needs: whether the engines at their other ends still run.

A decode engine awaits nothing from an idle prefill engine, and a prefill engine writes nothing to an idle decode
engine. So neither would notice that the other has ended, and vLLM forgets engines only during a handshake.
``IdleConnections`` pings the agents of idle engines about once a minute, in both roles. Two witnesses prove an end, as
for a load: a send that failed, and two probes of the side channel (``core.liveness.PeerWatch``). Then the connection is
dropped, and NIXL closes its sockets and unmaps its memory. Silence alone proves nothing, and drops nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from layerpush.core import liveness
from layerpush.core.liveness import PeerWatch
from layerpush.core.wire import Ping, encode, encode_heartbeat
from layerpush.transport.connections import Connections, Probe

logger = logging.getLogger(f"vllm.{__name__}")

PING_EVERY_S = 60.0
TIMEOUT_S = 4 * PING_EVERY_S
"""``PeerWatch`` pings four times in its timeout."""
CHECK_EVERY_S = 1.0


class IdleConnections:
    """See the module's text. Writer thread only.

    ``in_use`` returns the ids of engines that pushes, loads or measurements need. ``delay`` returns the seconds, 0 to
    ``PING_EVERY_S``, for which an engine that becomes idle is left alone: so a thousand engines are not pinged at once.
    """

    def __init__(
        self,
        engine_id: str,
        connections: Connections,
        probe: Probe,
        in_use: Callable[[], Collection[str]],
        delay: Callable[[], float],
    ) -> None:
        self._engine_id = engine_id
        self._connections = connections
        self._probe = probe
        self._in_use = in_use
        self._watch = PeerWatch(TIMEOUT_S)
        self._delay = delay
        self._idle: dict[str, tuple[str, ...]] = {}
        """The agents of each watched engine."""
        self._pings = 0
        self._next_check = 0.0

    def __len__(self) -> int:
        return len(self._idle)

    def on_pong(self, agent: str, now: float) -> None:
        """An agent has answered a ping."""
        self._watch.on_message(agent, now, speaks_layerpush=True)

    def next_due(self, _now: float) -> float:
        """When ``tick`` looks again."""
        return self._next_check

    def tick(self, now: float) -> None:
        """Look after the idle connections, every ``CHECK_EVERY_S`` seconds: turns of the writer are frequent."""
        if now < self._next_check:
            return
        self._next_check = now + CHECK_EVERY_S
        self._update(now)
        for action in self._watch.due(now):
            match action:
                case liveness.SendPing(_, agent, speaks_layerpush):
                    self._pings += 1
                    ping = encode(Ping(self._engine_id, self._pings)) if speaks_layerpush else encode_heartbeat(())
                    if not self._connections.notify(agent, ping):
                        self._watch.send_failed(agent, now)
                case liveness.StartProbe(engine_id, agent):
                    self._start_probe(engine_id, agent)
                case liveness.ReportGone(engine_id):
                    self._drop(engine_id, "its process has ended")
                case liveness.Reconnect(engine_id, _):
                    self._drop(engine_id, "no message reaches it, although it runs")

    def _update(self, now: float) -> None:
        in_use = self._in_use()
        idle = {
            engine_id: agents for engine_id, agents in self._connections.engines().items() if engine_id not in in_use
        }
        for engine_id, agents in list(self._idle.items()):
            if idle.get(engine_id) != agents:
                self._unwatch(engine_id)
        for engine_id, agents in idle.items():
            if engine_id not in self._idle:
                self._watch.await_agents(engine_id, agents, now + self._delay())
                self._idle[engine_id] = agents

    def _start_probe(self, engine_id: str, agent: str) -> None:
        rank, address = self._connections.agents(engine_id).get(agent), self._connections.address(engine_id)
        if rank is not None and address is not None:
            self._probe(agent, rank, address, partial(self._watch.probe_ended, engine_id, agent))

    def _drop(self, engine_id: str, reason: str) -> None:
        """If WRITEs are on their way over the connection, ``Connections`` drops it later."""
        logger.info("layerpush: the idle connection to engine %s is dropped: %s", engine_id, reason)
        if self._connections.forget(engine_id):
            self._unwatch(engine_id)

    def _unwatch(self, engine_id: str) -> None:
        self._watch.release_agents(engine_id, self._idle.pop(engine_id))
