"""One claim as a state machine: ``(state, event) -> state, actions``. No I/O, no clock, no threads.

The tables in ``claim_protocol`` have the events that each state accepts. The invariants, each with the method that
enforces it:

1. no push begins for a claim that D has cancelled or taken back, or that P has refused (``_on_registered``): only
   another registration opens it again, after ``Unregistered`` one with a higher attempt;
2. D hears that its blocks are free only when no push writes to them (``_on_cancelled``, ``_on_push_failed``);
3. while a push is not over, another registration of its key is refused and changes nothing (``_on_registered``);
4. copies of a registration get its last answer (``_on_registered``), which is the last word of P: a failure that is not
   drained is not kept (``_on_push_failed``);
5. a stock D gets no answer, so its claim waits where another one is refused.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from layerpush.core.machine import Machine
from layerpush.core.sizes import size_of
from layerpush.core.wire import (
    MAX_TP_SIZE,
    Accepted,
    Cancel,
    Cancelled,
    Fail,
    Registration,
    Unregistered,
    one_line,
)
from layerpush.prefill import claim_protocol as protocol
from layerpush.prefill.claim_protocol import IGNORED, TRANSITIONS, Action, Answer, Event, State
from layerpush.prefill.pairing import Named
from layerpush.prefill.push_protocol import Aborted

S = State
IN_USE = "another request of this id is being pushed"
Key = tuple[str, str]
CLAIM_BYTES = 1024
"""Bytes of a claim without its messages and the names of their senders."""
SENDER_BYTES = 64
"""Bytes of a sender's place beside others."""


class Claim(Machine[State, Event, Action]):
    """See the module's text. ``key``: D's engine, and D's id of the request."""

    TRANSITIONS: ClassVar = TRANSITIONS
    IGNORED: ClassVar = IGNORED

    def __init__(self, key: Key) -> None:
        super().__init__(key[1], S.IDLE)
        self.key = key
        self.registration: Registration | None = None
        """The newest that counts. Its blocks are kept only while it waits."""
        self.named: Named | None = None
        """The names and the prompt of the request: the registration, or D's ``Decline``."""
        self.filed_as: Named | None = None
        """What ``ClaimTable`` finds it by while it waits or is unwanted: ``named``."""
        self.answer: Answer | None = None
        """The last answer, for copies of the registration."""
        self.senders: frozenset[str] = frozenset()
        """The agents of D that have sent the registration: the first ones, if there are very many."""
        self._fingerprint: bytes | None = None
        self._named_bytes = self._senders_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory, about. Every copy of a registration asks for them, so they are not counted from anew."""
        return CLAIM_BYTES + self._named_bytes + self._senders_bytes + size_of(self.answer)

    @property
    def waits(self) -> bool:
        """Whether it waits for its request."""
        return self.state in (S.UNCONNECTED, S.PENDING)

    def is_equal(self, registration: Registration) -> bool:
        """Whether this is another rank's copy of the registration that counts."""
        return self._fingerprint == registration.fingerprint

    def _on_registered(self, event: protocol.Registered, actions: list[Action]) -> State:
        registration, last = event.registration, self.answer
        if isinstance(last, Unregistered):
            if registration.attempt <= last.attempt:
                actions.append(protocol.Tell(registration, last))
                return self.state
        elif self.registration is None and last is not None:  # D's other rank was faster with its ``Cancel``
            self._keep_registration(event)
            self._strip()
            actions.append(protocol.Tell(registration, last))
            return self.state
        elif self.is_equal(registration):
            return self._on_copy(event, actions)
        known = registration.attempt if self.registration is None else self.registration.attempt
        if registration.attempt < known:
            return self.state
        if registration.attempt > known and isinstance(last, Cancelled):  # which was faster than the next attempt
            self._tell(registration, last, actions)
            return self.state
        if event.busy:
            actions.append(protocol.ReportInUse(event.sender))
            self._tell(registration, Fail(registration.request_id, 0, IN_USE, True), actions)
            return self.state
        return self._open(event, actions)

    def _on_copy(self, event: protocol.Registered, actions: list[Action]) -> State:
        if self.state is S.IDLE:
            return self._open(event, actions, self.senders)
        self._add_sender(event)
        if self.answer is not None:
            actions.append(protocol.Tell(event.registration, self.answer))
            return self.state
        self._accept(event.registration, actions)
        return S.PENDING if self.state is S.UNCONNECTED and event.reachable else self.state

    def _open(self, event: protocol.Registered, actions: list[Action], senders: frozenset[str] = frozenset()) -> State:
        self._keep_registration(event, senders)
        self.answer = None
        self._accept(event.registration, actions)
        actions.append(protocol.Match())
        return S.PENDING if event.reachable else S.UNCONNECTED

    def _on_request_arrived(self, _: protocol.RequestArrived, actions: list[Action]) -> State:
        """P may connect to D now: its answer begins the handshake."""
        assert self.registration is not None
        self._accept(self.registration, actions)
        return S.PENDING

    def _on_matched(self, _: protocol.Matched, __: list[Action]) -> State:
        self._strip()
        return S.SERVED

    def _on_refused(self, event: protocol.Refused | protocol.TimedOut, actions: list[Action]) -> State:
        self._strip()
        assert self.registration is not None
        if not self.registration.layerpush:
            return S.IDLE
        self.answer = Fail(self.request_id, 0, one_line(event.reason), True)
        actions.append(protocol.Tell(self.registration, self.answer))
        return S.UNWANTED if isinstance(event, protocol.TimedOut) else S.ANSWERED

    def _on_rejected(self, event: protocol.Rejected, _: list[Action]) -> State:
        """Copies get the answer as well: what the sender did with its blocks after it cannot be known."""
        if not event.registration.layerpush:
            return S.IDLE
        self._keep_registration(protocol.Registered(event.sender, event.registration, reachable=False, busy=False))
        self._strip()
        self.answer = Fail(self.request_id, 0, one_line(event.reason), True)
        return S.ANSWERED

    def _on_dropped(self, _: protocol.Dropped, __: list[Action]) -> State:
        if self.waits:
            self._strip()
        if self.answer is None:
            return S.IDLE
        return S.WITHDRAWN if isinstance(self.answer, Unregistered) else S.ANSWERED

    def _on_cancelled(self, event: protocol.CancelledByD, actions: list[Action]) -> State:
        waited = self.waits
        if event.busy and not waited:
            actions += [protocol.Withdraw(), protocol.StopPush(event.message)]
            return self.state
        if waited:
            actions.append(protocol.Withdraw())
            self._strip()
        self._end(event.message, actions, connect=False)
        return S.UNWANTED if waited or self.state is S.UNWANTED else S.ANSWERED

    def _on_stopped(self, event: protocol.Stopped, actions: list[Action]) -> State:
        self._end(event.message, actions, connect=True)
        return S.ANSWERED

    def _on_withdrawn(self, event: protocol.Withdrawn, actions: list[Action]) -> State:
        attempt = event.message.attempt
        if self.registration is not None and self.registration.attempt > attempt:
            return self.state
        if self.answer is None:
            self.answer = Unregistered(self.request_id, attempt)
        if self.waits:
            self._strip()
        actions.append(protocol.Reply(event.message, self.answer, connect=self.registration is not None))
        return self.state if self.state in (S.ANSWERED, S.UNWANTED) else S.WITHDRAWN

    def _on_declined(self, event: protocol.Declined, actions: list[Action]) -> State:
        if self.registration is not None and not isinstance(self.answer, Unregistered):
            return self.state  # D has registered: it will cancel, and wait for the answer
        self._set(self.registration, event.message)
        actions += [protocol.Withdraw(), protocol.DropRequest()]
        return S.UNWANTED

    def _on_push_failed(self, event: protocol.PushFailed, actions: list[Action]) -> State:
        report, registration = event.report, event.report.registration
        if not registration.layerpush:
            if not report.drained or report.reason != Aborted.reason:
                return self.state
            self._set(registration, registration)  # the request may come again
            return S.PENDING
        answer: Answer = Fail(self.request_id, report.epoch, one_line(report.reason), report.drained, report.void)
        if report.drained:
            answer = Cancelled(self.request_id) if report.cancelled and not report.void else answer
            self.answer = answer
        actions.append(protocol.Tell(registration, answer))
        return S.ANSWERED if report.drained else self.state

    def _keep_registration(self, event: protocol.Registered, senders: frozenset[str] = frozenset()) -> None:
        self._set(event.registration, event.registration)
        self._fingerprint = event.registration.fingerprint
        self.senders, self._senders_bytes = senders, sum(map(size_of, senders))
        self._add_sender(event)

    def _add_sender(self, event: protocol.Registered) -> None:
        if event.sender not in self.senders and len(self.senders) < MAX_TP_SIZE:
            self.senders |= {event.sender}
            self._senders_bytes += SENDER_BYTES + size_of(event.sender)

    def _strip(self) -> None:
        if self.registration is not None:
            stripped = replace(self.registration, local_block_ids=(), contact=None)
            self._set(stripped, stripped)

    def _set(self, registration: Registration | None, named: Named) -> None:
        self.registration, self.named = registration, named
        self._named_bytes = size_of(named) + (0 if registration is named else size_of(registration))

    def _end(self, message: Cancel, actions: list[Action], *, connect: bool) -> None:
        self.answer = Cancelled(self.request_id)
        actions.append(protocol.Reply(message, self.answer, connect))

    def _accept(self, registration: Registration, actions: list[Action]) -> None:
        has_token, prefix = registration.sampling is not None, registration.prefix_tokens
        self._tell(registration, Accepted(registration.request_id, has_token, prefix), actions)

    def _tell(self, registration: Registration, answer: Answer, actions: list[Action]) -> None:
        if registration.layerpush:
            actions.append(protocol.Tell(registration, answer))

    HANDLERS: ClassVar = {
        protocol.Registered: _on_registered,
        protocol.RequestArrived: _on_request_arrived,
        protocol.Matched: _on_matched,
        protocol.Refused: _on_refused,
        protocol.TimedOut: _on_refused,
        protocol.Rejected: _on_rejected,
        protocol.Dropped: _on_dropped,
        protocol.CancelledByD: _on_cancelled,
        protocol.Stopped: _on_stopped,
        protocol.Withdrawn: _on_withdrawn,
        protocol.Declined: _on_declined,
        protocol.PushFailed: _on_push_failed,
    }
