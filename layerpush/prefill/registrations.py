"""Messages of decode engines to this prefill rank: registrations, cancellations, pings. Writer thread only.

A registration is matched with its request; either may come first. If the request has failed here, the registration is
answered at once. If there is no such request yet, the registration is kept. It is refused once it has waited for
``unknown_timeout_s`` seconds and the engine's scheduler still has no such request, or for ``OTHER_PROMPT_S`` seconds if
every request of its name has another prompt.

Every rank of a decode engine sends an equal registration, but for its contact. The first to come counts for all. If a
registration comes from an agent that is no connected rank of its engine, the engine was restarted, or another engine
uses its name. It is held until the side channel of the connected engine has answered.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from layerpush.core.bounded_dict import BoundedDict
from layerpush.core.bounded_index import BoundedIndex
from layerpush.core.liveness import Verdict
from layerpush.core.request_index import Arrived, RequestIndex
from layerpush.core.request_names import Named, RequestNames, named_prompts, of_transfer
from layerpush.core.wire import (
    MAX_COMPUTED,
    MAX_TP_SIZE,
    Accepted,
    Cancel,
    Cancelled,
    Decline,
    Fail,
    FirstToken,
    Ping,
    Queued,
    Registration,
    Unregister,
    Unregistered,
    one_line,
)
from layerpush.prefill.arrivals import Arrivals
from layerpush.prefill.decode_peers import Answer, DecodePeers, address_of
from layerpush.prefill.pending_registrations import KEPT_S, Key, PendingRegistrations
from layerpush.prefill.push_protocol import Aborted, ReportFailure, SendFirstToken
from layerpush.prefill.writer import PushWriter
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.connections import Address, Connections, Probe

logger = logging.getLogger(f"vllm.{__name__}")

REMEMBERED = 4096
REMEMBERED_BYTES = 32 << 20
"""Of each table."""
UNWANTED_BYTES = 32 << 20
ENDED_S = 60.0
ENDED_KEPT = 1 << 16
ENDED_BYTES = 64 << 20
ELSEWHERE_S = 10.0
"""Seconds for which it is known that a request went to another rank. The next attempt may come to this one."""
PROBES = 5
LOOK_EVERY_S = 0.25
QUEUED_EVERY_S = 1.0
NAMED_CHARS = 256
"""``Queued`` leaves out longer names, to stay small."""
QUEUED_VERSION = 2
"""The version of our messages that has ``Queued``, ``Unregister`` and ``Unregistered``."""
OTHER_PROMPT_S = 0.5
"""Seconds for which a registration waits for a request with its prompt while its name has another one. A router may
give one id to two requests, and they may come in any order.
"""
NO_REQUEST = "no such request came to the prefill engine"
SPARE_ANSWER = "the prefill engine has one answer to the prompt, and the decode engine's request wants several (n)"
OTHER_PROMPT = "the prefill engine's request of this id has another prompt"


@dataclasses.dataclass(frozen=True, slots=True)
class _Registered:
    """A registration's fingerprint, and the agents that sent it: ranks of the decode engine.

    ``accepted``: it was answered over a connection, or one that is being made.
    """

    fingerprint: bytes
    attempt: int
    senders: frozenset[str]
    accepted: bool = False

    def also(self, sender: str) -> _Registered:
        """A copy with another sender; the first ranks count only."""
        if len(self.senders) >= MAX_TP_SIZE:
            return self
        return dataclasses.replace(self, senders=self.senders | {sender})

    def is_equal(self, registration: Registration) -> bool:
        return self.fingerprint == registration.fingerprint


class Registrations:
    """``base_id`` strips the suffix that an engine adds to the id its router gave. ``steps`` returns the number of
    steps that the engine has begun, and whether the last one runs. ``on_withdrawn`` gets each request that its decode
    engine does not want any more.
    """

    def __init__(
        self,
        writer: PushWriter,
        connections: Connections,
        probe: Probe,
        peer_errors: PeerErrors,
        base_id: Callable[[str], str],
        steps: Callable[[], tuple[int, bool]],
        unknown_timeout_s: float,
        on_withdrawn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.peers = DecodePeers(writer, connections, probe, peer_errors)
        self._writer = writer
        self._connections = connections
        self._peer_errors = peer_errors
        self._arrivals = Arrivals(base_id)
        self._arrived: deque[Sequence[Arrived]] = deque()
        self._names = RequestNames(base_id, self._digest_of, self._transfer_of)
        self._pending = PendingRegistrations(self._names)
        self._steps, self._unknown_timeout_s = steps, unknown_timeout_s
        self._look_at = self._queued_at = 0.0
        self.short_of_blocks = False
        """Whether the engine's queue waits for free blocks. The main thread sets it."""
        self._prompt_waits = False
        self._on_withdrawn = on_withdrawn
        self._served: BoundedDict[Key, str] = BoundedDict(REMEMBERED, REMEMBERED_BYTES)
        self._answers: BoundedDict[Key, Answer] = BoundedDict(REMEMBERED, REMEMBERED_BYTES)
        """The last answers to registrations that no push will serve any more."""
        self._senders: BoundedDict[Key, _Registered] = BoundedDict(REMEMBERED, REMEMBERED_BYTES)
        self._unwanted: BoundedIndex[Named] = BoundedIndex(REMEMBERED, UNWANTED_BYTES, KEPT_S)
        """Cancelled, declined and refused requests that were not here."""
        self._failures: BoundedDict[str, tuple[float, str]] = BoundedDict(ENDED_KEPT, ENDED_BYTES)
        self._ended = RequestIndex(base_id, ENDED_KEPT, ENDED_BYTES, ENDED_S)

    @property
    def pending(self) -> int:
        """The number of registrations that wait for their request. Any thread."""
        return len(self._pending)

    # From decode engines.

    def on_registration(self, sender: str, registration: Registration, now: float) -> None:
        """A ``PUSH_REG`` arrived."""
        key = registration.key
        self._take_arrivals(now)
        self.peers.note_contact(sender, registration)
        if self.peers.closing(registration.decode_engine_id) is not None:
            self.peers.hold(sender, registration)
            return
        if self._is_from_unconnected_agent(sender, registration):
            self._hold(sender, registration)
            return
        self.peers.found(registration.decode_engine_id, now)
        taken_back = self._answers.get(key)
        if isinstance(taken_back, Unregistered):
            if registration.attempt <= taken_back.attempt:
                self._answer(registration, taken_back, now)
                return
            del self._answers[key]
        if not self._note(sender, registration, now):
            return
        if key in self._answers:
            self._answer(registration, self._answers[key], now)
        else:
            self._accept(registration, now)
        if key in self._answers or key in self._served or key in self._pending:
            return  # another rank's, or the same once more
        named = self._arrivals.with_any(self._names.keys(registration))
        waiting = [each for each in named if self._writer.is_waiting(each)]
        request_id = self._names.match(registration, waiting)
        if request_id is not None:
            self._served.note(key, request_id)
            self._writer.register(request_id, registration)
            return
        if any(self._names.is_misnamed(registration, candidate) for candidate in waiting):
            self._refuse(registration, OTHER_PROMPT, now)
            return
        if self._names.is_spare_answer(registration, self._begun_or_ended(registration)):
            self._refuse(registration, SPARE_ANSWER, now)
            return
        reason = self._failure_of(registration, now)
        if reason is not None and registration.layerpush:
            self._refuse(registration, reason, now)
            return
        for dropped in self._pending.add(registration, now):
            self._refuse(dropped, NO_REQUEST, now)

    def on_cancel(self, sender: str, message: Cancel, now: float) -> None:
        """A decode engine cancels a registration: it wants the blocks back."""
        key, engine_id = message.key, message.decode_engine_id
        registered, agents = self._senders.get(key), self._connections.agents(engine_id)
        if registered is not None and sender not in registered.senders and sender not in agents:
            self._peer_errors.add("foreign cancel", f"agent {sender} cancels {message.request_id}, not its own", now)
            return
        if self.peers.closing(engine_id) is not None:
            return  # it can be answered when the connection is gone; the decode engine asks again
        self.peers.found(engine_id, now)
        kept = self._pending.drop(key)
        if kept is not None:
            self._note_unwanted(kept, now)
        request_id = self._writer.serving(key)
        self._withdraw(request_id, kept, now)
        if request_id is None or self._writer.cancel(request_id, key):  # else ``report_failure`` follows
            self._answers.note(key, Cancelled(message.request_id))
            address = Address(engine_id, message.decode_host, message.decode_port, message.decode_tp_size)
            self.peers.answer(address, Cancelled(message.request_id), now, connect=request_id is not None)

    def on_unregister(self, sender: str, message: Unregister, now: float) -> None:
        """A decode engine takes a registration back, and will register again. A push that has begun goes on."""
        key, engine_id = message.key, message.decode_engine_id
        registered = self._senders.get(key)
        if (
            registered is not None
            and sender not in registered.senders
            and sender not in self._connections.agents(engine_id)
        ):
            text = f"agent {sender} unregisters {message.request_id}, not its own"
            self._peer_errors.add("foreign unregister", text, now)
            return
        if self.peers.closing(engine_id) is not None or (
            registered is not None and registered.attempt > message.attempt
        ):
            return
        if key not in self._answers:
            if key in self._served:
                return
            self._pending.drop(key)
            self._answers.note(key, Unregistered(message.request_id, message.attempt))
        address = Address(engine_id, message.decode_host, message.decode_port, message.decode_tp_size)
        self.peers.answer(address, self._answers[key], now, connect=registered is not None)

    def on_decline(self, message: Decline, now: float) -> None:
        """A decode engine will not load a request. If it has registered the request, the registration counts."""
        if message.key in self._senders and not isinstance(self._answers.get(message.key), Unregistered):
            return
        self._withdraw(None, message, now)
        named = self._arrivals.with_any(self._names.keys(message))
        request_id = self._names.match(message, [each for each in named if self._writer.is_waiting(each)])
        if request_id is None or not self._writer.decline(request_id):
            self._note_unwanted(message, now)

    def on_ping(self, sender: str, message: Ping) -> None:
        """A peer asks for a ``Pong``."""
        self.peers.pong(sender, message)

    # From the engine's scheduler.

    def came(self, requests: Sequence[Arrived]) -> None:
        """These requests have come to the engine. They may wait in its queue. Main thread, before their first step is
        announced.
        """
        self._arrived.append(requests)

    def _take_arrivals(self, now: float) -> None:
        """Note the requests that have come, and accept the registrations that waited for one of them."""
        while self._arrived:
            requests = self._arrived.popleft()
            self._arrivals.came(requests)
            for request in requests:
                for registration in self._pending.matching(request.request_id, now):
                    if not self._senders[registration.key].accepted:  # the answer begins the handshake
                        self._accept(registration, now)

    def went_elsewhere(self, request_id: str, rank: int, now: float) -> None:
        """A request went to another data-parallel ``rank``. A decode engine that has registered it here, or does so
        soon, has been given the wrong rank.
        """
        reason = f"the request went to data-parallel rank {rank} of the prefill engine"
        self._note_failure(self._names.base(request_id), now + ELSEWHERE_S, reason)
        self._refuse_pending(request_id, reason, now)

    def may_lapse(self, request_id: str) -> bool:
        """Whether heartbeats must not prolong a request's lease: no decode engine has registered it, and a registered
        prompt waits for blocks. Any thread.
        """
        return self._prompt_waits and request_id in self._writer.computed()

    # From the writer.

    def take(self, request_id: str, now: float) -> Registration | None:
        """The registration that came before its request, if one did."""
        self._take_arrivals(now)
        self._failures.pop(self._names.base(request_id), None)
        self._failures.pop(of_transfer(self._transfer_of(request_id) or ""), None)
        for misnamed in self._pending.drop_if(lambda entry: self._names.is_misnamed(entry, request_id), request_id):
            self._refuse(misnamed, OTHER_PROMPT, now)
        for spare in self._pending.drop_if(lambda entry: self._names.is_spare_answer(entry, [request_id]), request_id):
            self._refuse(spare, SPARE_ANSWER, now)
        registration = self._pending.take(request_id, now)
        if registration is not None:
            self._served.note(registration.key, request_id)
        return registration

    def is_unwanted(self, request_id: str, now: float) -> bool:
        """Whether D cancelled or declined this request, or P refused its registration, before the request was there."""
        self._take_arrivals(now)
        self._unwanted.expire(now)
        keys = self._names.keys_of(request_id)
        meant = (named for named in self._unwanted.find(keys, now) if self._names.is_for(named, request_id))
        unwanted = next(meant, None)
        return unwanted is not None and bool(self._unwanted.drop([unwanted.key]))

    def is_current(self, registration: Registration) -> bool:
        """Whether the engine that we are connected to is the process that sent this registration.

        An engine that was restarted under its old name has given these blocks to other requests.
        """
        agents = set(self._connections.agents(registration.decode_engine_id))
        registered = self._senders.get(registration.key)
        return (
            registered is not None and registered.is_equal(registration) and not agents.isdisjoint(registered.senders)
        )

    def report_failure(self, report: ReportFailure, now: float) -> None:
        """Send the decode engine a push's failure: no completion will come."""
        registration = report.registration
        if not registration.layerpush:
            if report.drained and report.reason == Aborted.reason:
                self._served.pop(registration.key, None)
                for dropped in self._pending.add(registration, now):  # a stock engine: the request may come again
                    self._refuse(dropped, NO_REQUEST, now)
            return
        message: Cancelled | Fail = Fail(registration.request_id, report.epoch, one_line(report.reason), report.drained)
        if report.drained:
            message = Cancelled(registration.request_id) if report.cancelled else message
            self._answers.note(registration.key, message)
        self._answer(registration, message, now)

    def send_first_token(self, action: SendFirstToken, now: float) -> None:
        """Send every rank of the decode engine the first token, or None. The decode engine has asked for it.

        It is sent once. A decode engine that misses it computes the token itself.
        """
        registration = action.registration
        if registration.layerpush:
            self._answer(registration, FirstToken(registration.request_id, action.token, action.other), now)

    def ended(self, request_id: str, failure: str | None, now: float) -> None:
        """A request is over here. Decode engines that wait for it, or register it soon, get the ``failure``."""
        self._take_arrivals(now)
        self._unwanted.drop(self._names.keys_of(request_id), lambda named: self._names.is_for(named, request_id))
        transfer = self._transfer_of(request_id)
        self._ended.add(Arrived(request_id, transfer), now)
        if failure is not None:
            reason = f"the prefill request has ended: {failure}"
            self._note_failure(self._names.base(request_id), now + ENDED_S, reason)
            if transfer is not None:
                self._note_failure(of_transfer(transfer), now + ENDED_S, reason)
            self._refuse_pending(request_id, failure, now)
        self._arrivals.remove(request_id)

    def next_due(self, _now: float) -> float | None:
        """When ``tick`` looks at requests that wait; None: when one comes. It forgets old entries at any later time."""
        times = [self._look_at] if self._pending else []
        return min([*times, self._queued_at] if self.short_of_blocks else times, default=None)

    def tick(self, now: float) -> None:
        """Forget old entries; drop connections that are closing."""
        self._unwanted.expire(now)
        while self._failures and next(iter(self._failures.values()))[0] <= now:
            del self._failures[next(iter(self._failures))]
        self._ended.expire(now)
        for dropped in self._pending.expire(now):
            self._refuse(dropped, NO_REQUEST, now)
        self._refuse_unknown(now)
        self._report_queued(now)
        for engine_id in self.peers.tick(now):
            self._take_held(engine_id, now)

    def _begun_or_ended(self, registration: Registration) -> Iterator[str]:
        """Requests that have begun here, or have ended a short while ago, and share a key with the registration."""
        keys = self._names.keys(registration)
        yield from (request_id for request_id in self._arrivals.with_any(keys) if request_id in self._writer)
        yield from self._ended.with_any(keys)

    def _refuse_unknown(self, now: float) -> None:
        begun, running = self._steps()
        self._take_arrivals(now)
        self._arrivals.look(begun, running, now)
        if not self._pending or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        self._refuse_older(self._unknown_timeout_s, lambda entry: not self._is_here(entry), NO_REQUEST, now)
        named = {entry.key for each in self._arrivals.requests for entry in self._pending.naming(each)}
        self._refuse_older(
            OTHER_PROMPT_S, lambda entry: entry.key in named and self._wants_other_prompt(entry), OTHER_PROMPT, now
        )

    def _refuse_older(self, age_s: float, is_hopeless: Callable[[Registration], bool], reason: str, now: float) -> None:
        for since, registration in self._pending.older_than(age_s, now):
            if not self._arrivals.is_complete(since, now):
                return
            if registration.layerpush and is_hopeless(registration):
                self._pending.drop(registration.key)
                self._note_unwanted(registration, now)
                self._refuse(registration, reason, now)

    def _wants_other_prompt(self, registration: Registration) -> bool:
        """Whether every request of its name has another prompt."""
        found = self._arrivals.with_any(self._names.keys(registration))
        named = [each for each in found if self._names.is_named(registration, each)]
        return all(self._names.prompts_differ(registration, each) for each in named)

    def _report_queued(self, now: float) -> None:
        """The engine is full. If a registered prompt waits, prompts that nobody has registered give way: their decode
        engines may need the blocks that wait for this one.
        """
        if not self.short_of_blocks:
            self._prompt_waits = False
        elif now >= self._queued_at:
            self._queued_at = now + QUEUED_EVERY_S
            self._take_arrivals(now)
            waiting = [each for each in self._arrivals.requests if each not in self._writer]
            queued = {entry.key: entry for each in waiting for entry in self._pending.matching(each, now)}
            self._prompt_waits = bool(queued) or self._writer.has_registered_prompts
            names = self._names_of(self._writer.computed()) if queued else ()
            for registration in queued.values() if names else ():
                if registration.layerpush >= QUEUED_VERSION:
                    self._answer(registration, Queued(registration.request_id, names), now)

    def _names_of(self, request_ids: list[str]) -> tuple[str, ...]:
        prompts = (
            named_prompts([self._names.base(each), self._transfer_of(each)], self._digest_of(each))
            for each in request_ids
        )
        names = set().union(*prompts)
        return tuple(sorted(name for name in names if len(name) <= NAMED_CHARS))[:MAX_COMPUTED]

    def _withdraw(self, request_id: str | None, named: Named | None, now: float) -> None:
        self._take_arrivals(now)
        if request_id is None and named is not None:
            given = named.prefill_request_id
            exact = given is not None and self._names.base(given) != given
            known = self._arrivals.with_any(self._names.keys(named))
            request_id = self._names.match(named, [each for each in known if each == given] if exact else known)
        if request_id is not None:
            self._on_withdrawn(request_id)

    def _note_unwanted(self, named: Named, now: float) -> None:
        if isinstance(named, Registration):
            named = replace(named, local_block_ids=(), contact=None)
        self._unwanted.drop([named.key])
        self._unwanted.add(named, [named.key, *self._names.keys(named)], now)

    def _is_here(self, registration: Registration) -> bool:
        return self._arrivals.has_any(self._names.keys(registration))

    def _failure_of(self, registration: Registration, now: float) -> str | None:
        for base in self._names.bases(registration):
            deadline, reason = self._failures.get(base, (0.0, ""))
            if deadline > now and not self._arrivals.has_any([base]):  # else it came again
                return reason
        transfer = registration.transfer_id
        deadline, reason = self._failures.get(of_transfer(transfer or ""), (0.0, ""))
        lives = self._arrivals.has_any([of_transfer(transfer or "")])
        return reason if transfer is not None and deadline > now and not lives else None

    def _note_failure(self, name: str, until: float, reason: str) -> None:
        self._failures.note(name, (until, reason))

    def _transfer_of(self, request_id: str) -> str | None:
        """The ``transfer_id`` of a request that is here, or was a short while ago."""
        found = (self._arrivals.get(request_id), self._ended.get(request_id))
        return next((each.transfer_id for each in found if each is not None and each.transfer_id), None)

    def _digest_of(self, request_id: str) -> str | None:
        """The digest of the prompt of a request that is here."""
        request = self._arrivals.get(request_id)
        return None if request is None else request.prompt_digest

    def _refuse_pending(self, request_id: str, reason: str, now: float) -> None:
        for registration in self._pending.matching(request_id, now):
            if registration.layerpush:
                self._pending.drop(registration.key)
                self._refuse(registration, reason, now)

    def _refuse(self, registration: Registration, reason: str, now: float) -> None:
        if reason == NO_REQUEST:  # anybody may cause many of these
            self._peer_errors.add("unknown request", f"no push for {registration.request_id}: {reason}", now)
        else:
            logger.warning("layerpush: no push for %s: %s", registration.request_id, reason)
        if registration.layerpush:
            message = Fail(registration.request_id, 0, one_line(reason), True)
            self._answers.note(registration.key, message)
            self._answer(registration, message, now)

    def _accept(self, registration: Registration, now: float) -> None:
        registered = self._senders[registration.key]
        if self._is_here(registration) or self._connections.agents(registration.decode_engine_id):
            self._senders.note(registration.key, dataclasses.replace(registered, accepted=True), self._is_live)
        if registration.layerpush:
            self._answer(registration, Accepted(registration.request_id, registration.sampling is not None), now)

    def _answer(self, registration: Registration, message: Answer, now: float) -> None:
        """Only a request that is here is a reason to connect: anybody may name any host in a registration."""
        self.peers.answer(address_of(registration), message, now, connect=self._is_here(registration))

    def _note(self, sender: str, registration: Registration, now: float) -> bool:
        """Note a registration. False if another one under the same key is still being served: only one can have the
        blocks' bytes. Either the sender of the other was replaced, or it gave the same id to two requests.
        """
        key = registration.key
        registered = self._senders.get(key)
        if registered is not None and registered.is_equal(registration):
            self._senders.note(key, registered.also(sender), self._is_live)
            return True
        if registered is not None and registration.attempt < registered.attempt:
            return False  # the decode engine has taken it back
        if registered is not None and self._writer.serving(key) is not None:
            reason = "another request of this id is being pushed"
            self._peer_errors.add("id in use", f"agent {sender} registers {registration.request_id}: {reason}", now)
            if registration.layerpush:
                self._answer(registration, Fail(registration.request_id, 0, reason, True), now)
            return False
        if registered is not None:
            self._pending.drop(key)
            self._answers.pop(key, None)
            self._served.pop(key, None)
        first = _Registered(registration.fingerprint, registration.attempt, frozenset({sender}))
        self._senders.note(key, first, self._is_live)
        return True

    def _is_live(self, key: Key) -> bool:
        return key in self._pending or self._writer.serving(key) is not None

    # Registrations from agents that are no connected rank of their engine.

    def _is_from_unconnected_agent(self, sender: str, registration: Registration) -> bool:
        known = self._connections.agents(registration.decode_engine_id)
        registered = self._senders.get(registration.key)
        is_equal = registered is not None and registered.is_equal(registration)
        is_sibling = registration.key in self._served and is_equal
        return bool(known) and sender not in known and not is_sibling

    def _hold(self, sender: str, registration: Registration) -> None:
        engine_id = registration.decode_engine_id
        if self.peers.hold(sender, registration):
            self._ask_about(engine_id, self._connections.agents(engine_id)[0], PROBES)

    def _ask_about(self, engine_id: str, agent: str, left: int) -> None:
        self.peers.probe(engine_id, agent, partial(self._on_verdict, engine_id, agent, left))

    def _on_verdict(self, engine_id: str, agent: str, left: int, verdict: Verdict, now: float) -> None:
        if agent not in self._connections.agents(engine_id):  # it was forgotten meanwhile, and may be connected anew
            self._take_held(engine_id, now)
        elif self.peers.closing(engine_id) is not None or not self.peers.holds(engine_id):
            return  # the registrations are taken when the connection is gone
        elif verdict is Verdict.UNKNOWN and left > 1:
            self._ask_about(engine_id, agent, left - 1)
        elif verdict is Verdict.ENDED:
            self._pending.drop_if(lambda entry: entry.decode_engine_id == engine_id)
            self.peers.close(engine_id, "the decode engine was restarted")
        else:
            self.peers.reject_held(engine_id, now)

    def _take_held(self, engine_id: str, now: float) -> None:
        for sender, registration in self.peers.take_held(engine_id):
            self.on_registration(sender, registration, now)
