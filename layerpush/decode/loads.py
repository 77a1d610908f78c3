"""What this decode rank awaits: one session per request, and what prefill engines say about it. Writer thread only."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from msgspec.structs import replace

from layerpush.core import liveness, load_protocol
from layerpush.core.liveness import PeerWatch
from layerpush.core.load_protocol import Action, Event, GiveUp, Park, State, Succeed, Unpark
from layerpush.core.load_session import DecodeSession
from layerpush.core.wire import (
    Accepted,
    Cancel,
    Cancelled,
    Completion,
    Fail,
    Ping,
    Registration,
    Unpack,
    WireError,
    encode,
    encode_completion,
    encode_heartbeat,
    encode_quietly,
    encode_registration,
)
from layerpush.decode.load import Awaited, LoadHost
from layerpush.telemetry.metrics.loads import LoadMeter
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.connections import Address, Connections, Probe
from layerpush.transport.packing.unpacker import Answer, Unpacker, UnpackError

logger = logging.getLogger("vllm.layerpush.decode")

HOLD_S = 30.0
HELD = 65536
SPEAKERS_KEPT = 4096

Word = Accepted | Fail | Cancelled | Completion | Unpack


class Loads:
    """``world_size`` is the number of this engine's tensor-parallel ranks: it decides how many completions make one.

    ``forget`` drops the connection to an engine; False if that has to wait for WRITEs that are on their way to it.
    ``keep`` takes the record of each load that was reported, and once more when blocks that it had set aside are free.
    """

    def __init__(
        self,
        engine_id: str,
        peers: Connections,
        watch: PeerWatch,
        probe: Probe,
        loads: LoadHost,
        peer_errors: PeerErrors,
        world_size: int,
        patience_s: float,
        forget: Callable[[str], bool],
        meter: LoadMeter,
        keep: Callable[[LoadRecord], None] = lambda _: None,
    ) -> None:
        self.unpacker: Unpacker | None = None
        self._meter = meter
        self._own_engine_id = engine_id
        self._connections = peers
        self._watch = watch
        self._probe = probe
        self._loads = loads
        self._peer_errors = peer_errors
        self._world_size = world_size
        self._patience_s = patience_s
        self._forget = forget
        self._keep_record = keep
        self._awaited: dict[str, Awaited] = {}
        self._early: deque[tuple[float, str, Word]] = deque()
        self._outcomes: deque[tuple[LoadRecord, Callable[[], None]]] = deque()
        self._pings = 0
        self._speakers: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._awaited)

    @property
    def engines_in_use(self) -> set[str]:
        """Prefill engines that something is awaited from. Any thread."""
        return {awaited.address.engine_id for awaited in list(self._awaited.values())}

    @property
    def is_waiting(self) -> bool:
        """Whether notifications matter now."""
        return bool(self._awaited or self._early or self._outcomes or (self.unpacker and self.unpacker.is_busy))

    # From the engine.

    def await_push(self, registration: Registration, address: Address, extra: dict[str, Any], now: float) -> None:
        """Register with a prefill engine; ``extra`` keys go along for stock engines. Raises ``WireError``."""
        if registration.request_id in self._awaited:
            reason = "an earlier request of the same id still has blocks that somebody may write to"
            self.refuse(registration.request_id, reason, now)
            return
        if self.unpacker is not None and (address.tp_size, address.pp_size) == (self._world_size, 1):
            registration = replace(registration, window=self.unpacker.offer(registration.request_id))
        try:
            payload = encode_registration(registration, **extra)
        except WireError:
            if self.unpacker is not None:
                self.unpacker.close(registration.request_id)
            raise
        session = DecodeSession(registration.request_id, patience_s=self._patience_s)
        record = self._record(registration.request_id, now)
        record.prefill_request_id, record.prefill_engine_id = registration.prefill_request_id, address.engine_id
        record.blocks = registration.blocks
        awaited = self._awaited[registration.request_id] = Awaited(session, address, registration, payload, now, record)
        self._register(awaited, now, again=True)

    def refuse(self, request_id: str, reason: str, now: float) -> None:
        """A request that cannot even be registered."""
        self._meter.ended("refused")
        record = self._record(request_id, now)
        record.settled("failed", reason, now)
        self._report(record, partial(self._loads.failed, request_id))
        logger.error("KV load of %s failed: %s", request_id, reason)

    def dropped(self, request_id: str, reason: str, now: float) -> None:
        """The engine aborted the request; it holds the blocks until the load is reported as over."""
        if request_id in self._awaited:
            self._awaited[request_id].dropped = True
        self._dispatch(request_id, load_protocol.Dropped(reason), now)

    def overdue(self, request_id: str, reason: str, now: float) -> None:
        """The request has waited for too long."""
        self._dispatch(request_id, load_protocol.Overdue(reason), now)

    # From prefill engines.

    def heard(self, sender: str, message: Word | None, now: float) -> None:
        """Anything from an agent; ``message`` if it is about a request. A word of ours says that the agent speaks."""
        speaks = message is None or not isinstance(message, Completion)
        self._watch.heard(sender, now, spoke=speaks)
        if speaks:
            self._speakers[sender] = None
            self._speakers.move_to_end(sender)
            while len(self._speakers) > SPEAKERS_KEPT:
                self._speakers.popitem(last=False)
        if message is None:
            return
        awaited = self._awaited.get(message.request_id)
        if awaited is None or awaited.session.state is State.REGISTERING:
            if isinstance(message, Unpack) and awaited is None and self.unpacker is not None:
                self._answer(self.unpacker.refuse(sender, message))
            elif not isinstance(message, Cancelled):
                self._keep(sender, message, now)
            return
        if sender not in awaited.session.agents:
            text = f"agent {sender} speaks of {message.request_id}, for which it was not asked"
            self._peer_errors.add("foreign word", text, now)
            return
        if speaks:
            self._dispatch(message.request_id, load_protocol.Spoke(sender), now)
        event: Event
        match message:
            case Completion():
                if sender in awaited.session.open_agents:
                    awaited.completions.append(encode_completion(message.request_id, message.world_size))
                needed = awaited.address.pp_size * max(1, message.world_size // self._world_size)
                event = load_protocol.Completed(sender, needed)
            case Fail():
                event = load_protocol.Failed(sender, message.reason, message.drained)
            case Cancelled():
                event = load_protocol.Withdrawn(sender)
            case Unpack():
                self._unpack(awaited, sender, message, now)
                return
            case Accepted():
                awaited.record.t_accepted = awaited.record.t_accepted or now
                return
        self._dispatch(message.request_id, event, now)

    def connection_lost(self, agents: Collection[str], now: float) -> None:
        """Something else on this rank found the connection to an engine broken, and will drop it. Which of several
        agents it was that could not be reached is not known.
        """
        for agent in agents:
            if len(agents) == 1:
                self._watch.lost(agent, now)
            self._watch.cut(agent)

    # Time.

    def tick(self, now: float) -> None:
        """Let sessions look at the clock, prefill engines be asked for signs of life, and outcomes be reported."""
        for request_id, awaited in list(self._awaited.items()):
            due = awaited.session.next_due(now)
            if due is not None and due <= now:
                self._dispatch(request_id, load_protocol.Tick(), now)
        for order in self._watch.due(now):
            self._obey(order, now)
        for answer in self.unpacker.ended() if self.unpacker is not None else ():
            self._answer(answer)
        for _ in range(len(self._early)):
            deadline, sender, message = self._early.popleft()
            if deadline > now and len(self._early) < HELD:
                self._early.append((deadline, sender, message))
            elif isinstance(message, Completion):
                text = f"agent {sender} completes {message.request_id}, which does not wait"
                self._peer_errors.add("late completion", text, now)
        for _ in range(len(self._outcomes)):
            record, deliver = self._outcomes.popleft()
            if self._loads.knows(record.request_id):
                deliver()
                record.t_reported = now
                self._keep_record(replace(record))
            else:  # its step is not over; every request that was registered will be known
                self._outcomes.append((record, deliver))

    def _register(self, awaited: Awaited, now: float, *, again: bool) -> None:
        """Connect and send the registration; ``again``: once more if the engine turns out to have been replaced."""

        def connected(error: str | None, now: float) -> None:
            session, address = awaited.session, awaited.address
            if session.state is not State.REGISTERING:
                return
            if error is not None:
                self._dispatch(session.request_id, load_protocol.Unregistered(error), now)
                return
            agents = self._connections.agents(address.engine_id)
            if not again:
                self._watch.reconnected(agents)
            reached = frozenset(agent for agent in agents if self._connections.notify(agent, awaited.payload))
            for agent in agents:
                if agent not in reached:
                    self._watch.lost(agent, now)
            if not reached and again and self._drop(address.engine_id):
                self._register(awaited, now, again=False)
                return
            if not reached:
                reason = f"the connection to prefill engine {address.engine_id!r} is lost"
                self._dispatch(session.request_id, load_protocol.Unregistered(reason), now)
                return
            awaited.record.t_registered = now
            awaited.address = self._connections.address(address.engine_id) or address
            awaited.ranks = {
                agent: rank for agent in agents if (rank := self._connections.rank_of(address.engine_id, agent))
            }
            self._dispatch(session.request_id, load_protocol.Registered(frozenset(agents)), now)
            self._watch.add(address.engine_id, frozenset(agents), now)
            for agent in agents:
                if agent in self._speakers:  # it need not say so again, should its answer be lost
                    self._watch.spoke(agent)
                    self._dispatch(session.request_id, load_protocol.Spoke(agent), now)
            for agent in sorted(frozenset(agents) - reached):
                failed = load_protocol.Failed(agent, "it was not reached by the registration", True)
                self._dispatch(session.request_id, failed, now)
            for sender, message in self._replayed(session.request_id):
                self.heard(sender, message, now)

        self._connections.reach(awaited.address, connected, now)

    def _keep(self, sender: str, message: Word, now: float) -> None:
        """Any rank's registration may start the push for all: a rank that is a step behind hears of it too early."""
        self._early.append((now + HOLD_S, sender, message))

    def _replayed(self, request_id: str) -> list[tuple[str, Word]]:
        kept = list(self._early)
        self._early = deque(entry for entry in kept if entry[2].request_id != request_id)
        return [(sender, message) for _, sender, message in kept if message.request_id == request_id]

    def _dispatch(self, request_id: str, event: Event, now: float) -> None:
        awaited = self._awaited.get(request_id)
        if awaited is None:
            return
        actions = awaited.session.handle(event, now)
        if awaited.session.state is State.CLOSED:
            del self._awaited[request_id]
            if self.unpacker is not None:
                self.unpacker.close(request_id)
        for action in actions:
            self._perform(awaited, action, now)
        if awaited.session.state is State.CLOSED and awaited.session.agents:
            self._watch.remove(awaited.address.engine_id, awaited.session.agents)

    def _perform(self, awaited: Awaited, action: Action, now: float) -> None:
        request_id, record = awaited.session.request_id, awaited.record
        lost = "cancelled" if awaited.dropped else "failed"
        match action:
            case load_protocol.Cancel(agents):
                mine = awaited.registration
                address = mine.decode_engine_id, mine.decode_host, mine.decode_port, mine.decode_tp_size
                cancel = Cancel(request_id, *address)
                for agent in agents:
                    # one that has not spoken may be a stock one, or our registration or its answer was lost
                    payload = encode(cancel) if awaited.session.speaks(agent) else encode_quietly(cancel)
                    self._send(awaited.address.engine_id, agent, payload, now)
            case Succeed():
                self._meter.ended("loaded", now - awaited.since)
                record.settled("completed", None, now)
                self._report(record, partial(self._loads.loaded, awaited.completions))
            case GiveUp(reason):
                self._meter.ended("aborted" if awaited.dropped else "failed", now - awaited.since)
                record.settled(lost, reason, now)
                self._log_failure(awaited, reason, "")
                self._report(record, partial(self._loads.failed, request_id))
            case Park(reason):
                self._meter.ended("parked", now - awaited.since)
                self._log_failure(awaited, reason, "; its blocks are set aside until that engine answers or ends")
                record.settled(lost, reason, now)
                record.t_parked = now
                self._loads.parked(request_id)
                self._report(record, partial(self._loads.failed, request_id))
            case Unpark():
                logger.info("the blocks that were set aside for %s are free again", request_id)
                self._when_unpacked(request_id, partial(self._loads.cleared, request_id))
                record.t_cleared = now
                if record.t_reported is not None:
                    self._keep_record(replace(record))

    def _log_failure(self, awaited: Awaited, reason: str, what_then: str) -> None:
        level = logging.INFO if awaited.dropped else logging.WARNING
        engine = awaited.address.engine_id
        logger.log(level, "KV load of %s from %s failed: %s%s", awaited.session.request_id, engine, reason, what_then)

    def _record(self, request_id: str, now: float) -> LoadRecord:
        return LoadRecord(request_id=request_id, engine_id=self._own_engine_id, t_awaited=now)

    def _report(self, record: LoadRecord, deliver: Callable[[], None]) -> None:
        self._when_unpacked(record.request_id, lambda: self._outcomes.append((record, deliver)))

    def _when_unpacked(self, request_id: str, call: Callable[[], None]) -> None:
        if self.unpacker is None:
            call()
        else:
            self.unpacker.after(request_id, call)

    def _unpack(self, awaited: Awaited, sender: str, message: Unpack, now: float) -> None:
        """Scatter what is asked for; the answer follows when that is over, or at once when it cannot be."""
        if self.unpacker is None:
            self._peer_errors.add(
                "unpack", f"agent {sender} packs {message.request_id}, but no window was offered", now
            )
            return
        answer = self.unpacker.again(sender, message)
        try:
            if answer is None and sender in awaited.session.open_agents:
                self.unpacker.unpack(sender, message, awaited.registration)
            elif answer is None:
                answer = self.unpacker.refuse(sender, message)
        except UnpackError as error:
            self._peer_errors.add("unpack", f"what agent {sender} packed for {message.request_id}: {error}", now)
            answer = self.unpacker.refuse(sender, message)
        if answer is not None:
            self._send(awaited.address.engine_id, sender, encode(answer.message), now)

    def _answer(self, answer: Answer | None) -> None:
        """One that is lost is asked for again."""
        if answer is not None:
            self._connections.notify(answer.agent, encode(answer.message))

    def _send(self, engine_id: str, agent: str, payload: bytes, now: float) -> None:
        """A send that fails speaks against the agent, unless we have no connection that it could fail on."""
        if agent not in self._connections.agents(engine_id):
            self._watch.cut(agent)
        elif not self._connections.notify(agent, payload):
            self._watch.lost(agent, now)

    def _obey(self, order: liveness.Order, now: float) -> None:
        match order:
            case liveness.SendPing(engine_id, agent, spoke):
                self._pings += 1
                payload = encode(Ping(self._own_engine_id, self._pings)) if spoke else encode_heartbeat(())
                self._send(engine_id, agent, payload, now)
            case liveness.StartProbe(engine_id, agent):
                self._start_probe(engine_id, agent)
            case liveness.ReportSilent(agent, reason):
                self._meter.peer_lost("silent")
                self._tell_all(agent, load_protocol.Silent(agent, reason), now)
            case liveness.ReportGone(agent, reason):
                self._meter.peer_lost("gone")
                self._tell_all(agent, load_protocol.Gone(agent, reason), now)
                self._forget_dead_engine_of(agent)
            case liveness.Reconnect(engine_id):
                registered = (a.address for a in self._awaited.values() if a.ranks)
                address = next((address for address in registered if address.engine_id == engine_id), None)
                if address is not None and self._drop(engine_id):
                    self._connections.reach(address, partial(self._reconnected, engine_id), now, tries=1)

    def _drop(self, engine_id: str) -> bool:
        """Drop a connection to agents of which something is awaited; False if it has to stay for now."""
        agents = self._connections.agents(engine_id)
        if not self._forget(engine_id):
            return False
        for agent in agents:
            self._watch.cut(agent)
        return True

    def _start_probe(self, engine_id: str, agent: str) -> None:
        awaited = next((a for a in self._awaited.values() if agent in a.session.agents), None)
        if awaited is not None and agent in awaited.ranks:
            on_verdict = partial(self._watch.verdict, engine_id, agent)
            self._probe(agent, awaited.ranks[agent], awaited.address, on_verdict)

    def _reconnected(self, engine_id: str, error: str | None, _: float) -> None:
        if error is None:
            self._watch.reconnected(self._connections.agents(engine_id))
        else:
            logger.warning("cannot reconnect to prefill engine %s: %s", engine_id, error)

    def _tell_all(self, agent: str, event: Event, now: float) -> None:
        for request_id, awaited in list(self._awaited.items()):
            if agent in awaited.session.agents:
                self._dispatch(request_id, event, now)

    def _forget_dead_engine_of(self, agent: str) -> None:
        """Only when no rank of it may live: a send to a rank that we forget would fail, and that proves nothing."""
        for engine_id in {address.engine_id for address in self._connections.addresses}:
            agents = set(self._connections.agents(engine_id))
            if agent in agents and all(agents.isdisjoint(a.session.open_agents) for a in self._awaited.values()):
                self._forget(engine_id)
