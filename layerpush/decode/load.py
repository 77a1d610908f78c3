"""One request's load on one decode rank: registers it, turns messages into events, performs the session's actions.

Writer thread only. ``Loads`` creates it and hands it every event; ``PrefillPeers`` sends for it; ``Outcomes`` takes
its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from layerpush.core.load_news import LoadQueued
from layerpush.core.wire import (
    Accepted,
    Cancel,
    Cancelled,
    Completed,
    Completion,
    Decline,
    Fail,
    FirstToken,
    PartSums,
    PrefixLanded,
    Queued,
    Registration,
    Unregister,
    Unregistered,
    encode_completion,
)
from layerpush.decode import load_protocol
from layerpush.decode.checks import Checks
from layerpush.decode.early_messages import LoadMessage
from layerpush.decode.load_protocol import Action, Event, State
from layerpush.decode.load_session import LoadSession
from layerpush.decode.outcomes import Outcome, Outcomes
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.telemetry.defects import logged
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.peers import Address, Rank

if TYPE_CHECKING:
    from layerpush.compat.push_worker import VllmPushWorker

logger = logging.getLogger(f"vllm.{__name__}")


class Load:
    """``payload`` is the registration as it is sent."""

    def __init__(
        self,
        registration: Registration,
        payload: bytes,
        address: Address,
        session: LoadSession,
        record: LoadRecord,
        worker: VllmPushWorker,
        peers: PrefillPeers,
        outcomes: Outcomes,
        checks: Checks | None,
    ) -> None:
        self.registration = registration
        self.address = address
        self.session = session
        self.ranks: dict[str, Rank] = {}
        self._payload = payload
        self._record = record
        self._worker = worker
        self._peers = peers
        self._outcomes = outcomes
        self._checks = checks
        self._completions: list[bytes] = []
        self._prefixes: dict[str, PrefixLanded] = {}
        """The longest one with checksums of each agent, to compare if the load fails."""
        self._cancels = False
        """Whether the agents have been asked to stop."""
        self.unreported: Action | None = None
        """The report of the load's end, until it is queued."""
        self._know_prefixes: set[str] = set()
        """Agents that have accepted the registration with its ``prefix_tokens``."""

    @property
    def open_agents(self) -> frozenset[str]:
        return self.session.open_agents

    def register(
        self, on_registered: Callable[[Load, Sequence[Event], float], None], now: float, *, again: bool = True
    ) -> None:
        """Connect and send the registration; ``on_registered`` takes the events that follow from it.

        ``again``: connect once more if the engine turns out to have been replaced.
        """
        self._peers.connections.reach(self.address, partial(self._connected, on_registered, again), now)

    def on_message(
        self,
        sender: str,
        message: LoadMessage,
        payload: bytes,
        now: float,
    ) -> None:
        """A message of one of the load's agents; ``payload`` is the notification that it came in."""
        match message:
            case Completion() if self.registration.prefix_tokens and sender not in self._know_prefixes:
                reason = "it does not know that a part of a turn is wanted"
                self.handle(load_protocol.AgentFailed(sender, reason, drained=True), now)
            case Completion():
                if sender in self.session.open_agents:
                    self._completions.append(payload)
                needed = self.address.pp_size * max(1, message.world_size // self._worker.world_size)
                self.handle(load_protocol.AgentCompleted(sender, needed), now)
            case Completed():
                if self._is_right(sender, message, now):
                    plain = Completion(message.request_id, message.world_size)
                    self.on_message(sender, plain, encode_completion(plain.request_id, plain.world_size), now)
            case Fail():
                self.handle(load_protocol.AgentFailed(sender, message.reason, message.drained, message.void), now)
            case Cancelled():
                self.handle(load_protocol.AgentCancelled(sender), now)
            case Accepted():
                if message.prefix_tokens == self.registration.prefix_tokens:
                    self._know_prefixes.add(sender)
                self._record.t_accepted = self._record.t_accepted or now
                if message.first_token and self.registration.sampling is not None:
                    self.handle(load_protocol.TokenPromised(sender), now)
            case FirstToken():
                if message.token is None and self.session.first_token in ("not_promised", "late"):  # the first answer
                    self._peers.samples_otherwise(self.address.engine_id, message.request_id, message.other)
                self.handle(load_protocol.TokenArrived(sender, message.token), now)
            case PrefixLanded():
                if message.number == self.registration.number != 0:
                    self._note_prefix(sender, message)
                    self.handle(load_protocol.PrefixWritten(sender, message.tokens), now)
            case Queued():
                if self.session.state is State.WAITING:
                    self._outcomes.report(LoadQueued(message.request_id, frozenset(message.computed)))
            case Unregistered():
                if message.attempt == self.registration.attempt:
                    self.handle(load_protocol.AgentUnregistered(sender), now)

    def _note_prefix(self, sender: str, message: PrefixLanded) -> None:
        known = self._prefixes.get(sender)
        if self._checks is not None and message.sums and (known is None or known.tokens <= message.tokens):
            self._prefixes[sender] = message

    def _is_right(self, sender: str, message: Completed, now: float) -> bool:
        """Compare what an agent has written with its checksums. A difference ends its part of the load."""
        if self.session.state is State.PARKED or sender not in self.session.open_agents:
            return True  # the engine has what is kept of a parked load, and may have used those blocks again
        wrong = self._difference(sender, message.tokens, message.sums)
        if wrong is None:
            return True
        self.handle(load_protocol.AgentFailed(sender, wrong, drained=True, void=True), now)
        return False

    def _difference(self, sender: str, tokens: int, sums: Sequence[PartSums]) -> str | None:
        found = None if self._checks is None else self._checks.difference(self.registration, tokens, sums, self._record)
        return None if found is None else f"the KV from {sender} is not what it has sent: {found}"

    def handle(self, event: Event, now: float) -> None:
        """Give an event to the session and perform its actions. Raises ``IllegalTransitionError``."""
        actions = self.session.handle(event, now)
        for action in sorted(actions, key=_is_message):  # a report first: a message that cannot be sent comes again
            self._perform(action, now)

    def tick(self, now: float) -> None:
        """Time has passed, or a report has failed."""
        self.report(now)
        if self.session.accepts(load_protocol.Tick):
            self.handle(load_protocol.Tick(), now)

    def _connected(
        self,
        on_registered: Callable[[Load, Sequence[Event], float], None],
        again: bool,
        error: str | None,
        now: float,
    ) -> None:
        if not self.session.is_unsent:
            return
        try:
            self._register_connected(on_registered, again, error, now)
        except Exception as defect:  # the load fails; an agent that may have the registration is asked to stop
            logger.exception("layerpush: a defect ends the registration of %s", self.session.request_id)
            reason = f"{type(defect).__name__}: {defect}"
            failure: list[Event] = [load_protocol.RegistrationFailed(reason)]
            if self.ranks:
                if self._record.t_registered is None:
                    with logged("its watch", self.session.request_id):  # the agents may write, watched or not
                        self._await_agents(now)
                failure = [load_protocol.Registered(frozenset(self.ranks)), load_protocol.TimedOut(reason)]
            if self.session.is_unsent:
                on_registered(self, failure, now)

    def _register_connected(
        self,
        on_registered: Callable[[Load, Sequence[Event], float], None],
        again: bool,
        error: str | None,
        now: float,
    ) -> None:
        engine_id, peers = self.address.engine_id, self._peers
        error = error or self._worker.mismatch(engine_id) or peers.silence(engine_id)
        if error is None:
            if not again:
                peers.reconnected(engine_id)
            self.ranks = dict(peers.connections.agents(engine_id))
            reached = peers.send_registration(engine_id, self._payload, now)
            if reached:
                on_registered(self, self._registered(reached, now), now)
                return
            self.ranks = {}
            if again and peers.drop(engine_id):
                self.register(on_registered, now, again=False)
                return
            error = f"the connection to prefill engine {engine_id!r} is lost"
        on_registered(self, [load_protocol.RegistrationFailed(error)], now)

    def _registered(self, reached: frozenset[str], now: float) -> list[Event]:
        self._await_agents(now)
        agents = frozenset(self.ranks)
        self.address = self._peers.connections.address(self.address.engine_id) or self.address
        reason = "it was not reached by the registration"
        failures = [load_protocol.AgentFailed(agent, reason, drained=True) for agent in sorted(agents - reached)]
        return [load_protocol.Registered(agents), *failures]

    def _await_agents(self, now: float) -> None:
        self._peers.await_agents(self.address.engine_id, frozenset(self.ranks), now)
        self._record.t_registered = now

    def _perform(self, action: Action, now: float) -> None:
        match action:
            case load_protocol.SendCancel(agents):
                mine = self.registration
                address = mine.decode_engine_id, mine.decode_host, mine.decode_port, mine.decode_tp_size
                cancel = Cancel(mine.request_id, *address)
                for agent in agents:  # any may be a stock one, or our registration or its answer was lost
                    if self._cancels and self._worker.world_size > 1:  # P may know the load from another rank only
                        self._peers.register_again(self.address.engine_id, agent, self._payload, now)
                    self._peers.send(self.address.engine_id, agent, cancel, now)
                self._cancels = True
            case load_protocol.SendUnregister(agents):
                mine = self.registration
                unregister = Unregister(
                    mine.request_id,
                    mine.decode_engine_id,
                    mine.decode_host,
                    mine.decode_port,
                    mine.decode_tp_size,
                    mine.attempt,
                )
                for agent in agents:
                    self._peers.send(self.address.engine_id, agent, unregister, now)
            case _:
                self.unreported = action
                self.report(now)
                self._after_report(action)

    def report(self, now: float) -> None:
        """Report the load's end, unless it is reported. Before all else that may raise: nothing repeats it later."""
        match self.unreported:
            case load_protocol.ReportUnregistered():
                self._outcomes.report_ended(self._record, "unregistered", self.session.cause, now)
            case load_protocol.ReportLoaded(first_token):
                asked = self.registration.sampling is not None
                self._outcomes.report_ended(
                    self._record, "loaded", None, now, self._completions, first_token if asked else None
                )
            case load_protocol.ReportFailed(reason):
                self._report_failure("failed", reason, now)
            case load_protocol.ReportAborted(reason):
                self._report_failure("aborted", reason, now)
            case load_protocol.Park(reason):
                self._report_failure("parked", reason, now)
            case load_protocol.Clear():
                self._outcomes.report_cleared(self._record, now)
        self.unreported = None

    def _report_failure(self, outcome: Outcome, reason: str, now: float) -> None:
        """Compare what has landed before the report: afterwards the engine keeps it, and may use it."""
        kept, level = self.session.landed_tokens, logging.INFO if outcome == "aborted" else logging.WARNING
        found = (self._difference(agent, told.prompt_tokens, told.sums) for agent, told in self._prefixes.items())
        wrong = next((one for one in found if one is not None), None) if kept else None
        if wrong is not None:
            kept, reason = 0, f"{reason}; {wrong}"
        self._outcomes.report_ended(self._record, outcome, reason, now, kept=kept)
        self.unreported = None
        landed = f"; the KV of its first {kept} tokens has landed" if kept else ""
        parked = "; its blocks are parked until that engine answers or ends" if outcome == "parked" else ""
        self._log(logging.ERROR if wrong or self.session.is_void else level, f"{reason}{landed}{parked}")

    def _after_report(self, action: Action) -> None:
        match action:
            case load_protocol.ReportUnregistered():
                logger.info("layerpush: %s gives its blocks to other requests", self.session.request_id)
            case load_protocol.ReportFailed() | load_protocol.ReportAborted():
                self._decline_if_unregistered()
            case load_protocol.Clear():
                logger.info("the parked blocks of %s are free again", self.session.request_id)

    def _decline_if_unregistered(self) -> None:
        """P's blocks need not wait for a registration that will not come. A silent P would not hear of it."""
        if self._record.t_registered is None and self._peers.silence(self.address.engine_id) is None:
            mine = self.registration
            names = (
                mine.request_id,
                mine.decode_engine_id,
                mine.prefill_request_id,
                mine.prompt_digest,
                mine.transfer_id,
            )
            self._peers.decline(self.address, Decline(*names))

    def _log(self, level: int, reason: str) -> None:
        engine_id = self.address.engine_id
        logger.log(level, "KV load of %s from %s failed: %s", self.session.request_id, engine_id, reason)


def _is_message(action: Action) -> bool:
    return isinstance(action, load_protocol.SendCancel | load_protocol.SendUnregister)
