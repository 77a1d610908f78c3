"""Pairs requests of decode engines (D) with requests of this prefill rank (P). Writer thread only.

A registration of D makes a *claim*, and either half of a pair may come first. ``claim_protocol`` has the states of a
claim and the order of the decisions. This module turns messages, requests and endings into its events, and carries out
its actions. Two tables have all that P knows: ``ClaimTable`` and ``PromptRequests``.

A claim without a request times out after ``unknown_timeout_s`` seconds if the engine's scheduler still has no such
request, and after ``OTHER_PROMPT_S`` seconds if every request of its name has another prompt.

If a registration comes from an agent that is no connected rank of its engine, the engine was restarted, or another
engine uses its name. It is held until the side channel of the connected engine has answered. ``Connections`` decides
between two engines: if both live, the registrations of the second one are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from layerpush.core.liveness import Verdict
from layerpush.core.request_names import Arrived, named_prompts
from layerpush.core.wire import (
    MAX_COMPUTED,
    Cancel,
    Decline,
    Fail,
    FirstToken,
    Ping,
    Queued,
    Registration,
    Unregister,
)
from layerpush.prefill import claim_protocol as protocol
from layerpush.prefill.claim_protocol import Action, Answer, Event, State
from layerpush.prefill.claim_session import IN_USE, Claim
from layerpush.prefill.claim_table import ClaimTable
from layerpush.prefill.decode_peers import DecodePeers
from layerpush.prefill.links import address_of
from layerpush.prefill.pairing import Named, Pairing
from layerpush.prefill.prompt_requests import PromptRequest, PromptRequests, PromptState
from layerpush.prefill.push_protocol import ReportFailure, SendFirstToken
from layerpush.prefill.pushes import Pushes
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.connections import Connections, Probe
from layerpush.transport.peers import Address

PROBES = 5
POLL_EVERY_S = 0.25
QUEUED_EVERY_S = 1.0
NAMED_CHARS = 256
"""``Queued`` leaves out longer names, to stay small."""
QUEUED_VERSION = 2
"""The version of our messages that has ``Queued``, ``Unregister`` and ``Unregistered``."""
TIMED_OUT_AT_ONCE = 64
"""Claims that time out in one tick for one reason. Pushes must go on when many do."""
OTHER_PROMPT_S = 0.5
"""Seconds for which a claim waits for a request with its prompt while its name has another one. A router may give one
id to two requests, and they may come in any order.
"""
NO_REQUEST = "no such request came to the prefill engine"
REFUSED = "the prefill engine has refused the request"
SPARE_ANSWER = "the prefill engine has one answer to the prompt, and the decode engine's request wants several (n)"
OTHER_PROMPT = "the prefill engine's request of this id has another prompt or cache_salt"
NOT_KEPT = "the decode engine does not keep this turn"
OTHER_SIZE = "the decode engine has another number of ranks than the connection"
KINDS = {
    NO_REQUEST: "unknown request",
    NOT_KEPT: "turn not kept",
    OTHER_PROMPT: "other prompt",
    SPARE_ANSWER: "spare answer",
}
"""Refusals by reason, in the log and in the metrics. Those for any other reason are of one kind."""
RESTARTED = "the decode engine was restarted after it had registered"


class Claims:
    """``base_id`` strips the suffix that an engine adds to the id its router gave. ``steps`` returns the number of
    steps that the engine has begun, and whether the last one runs. ``on_withdrawn`` gets each request that its decode
    engine does not want any more.
    """

    def __init__(
        self,
        pushes: Pushes,
        connections: Connections,
        probe: Probe,
        peer_errors: PeerErrors,
        base_id: Callable[[str], str],
        steps: Callable[[], tuple[int, bool]],
        unknown_timeout_s: float,
        on_withdrawn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.peers = DecodePeers(connections, probe, peer_errors)
        connections.on_closed = self._take_held
        self._pushes = pushes
        self._connections = connections
        self._peer_errors = peer_errors
        self._pairing = Pairing(base_id)
        self._claims = ClaimTable(self._pairing, lambda key: pushes.serving(key) is not None)
        self._prompts = PromptRequests(self._pairing.keys_of)
        self._arrived: deque[Sequence[Arrived]] = deque()
        self._steps, self._unknown_timeout_s = steps, unknown_timeout_s
        self._poll_at = self._queued_at = 0.0
        self.short_of_blocks = False
        """Whether the engine's queue waits for free blocks. The main thread sets it."""
        self._prompt_waits = False
        self._on_withdrawn = on_withdrawn

    @property
    def pending(self) -> int:
        """The number of claims that wait for their request. Any thread."""
        return len(self._claims.waiting)

    # From decode engines.

    def on_registration(self, sender: str, registration: Registration, now: float) -> None:
        """A ``PUSH_REG`` arrived."""
        engine_id = registration.decode_engine_id
        self._take_arrivals(now)
        self.peers.note_contact(sender, registration)
        claim = self._claims.get(registration.key)
        if self._connections.closing(engine_id) is not None:
            self.peers.hold(sender, registration)
        elif self._is_from_unconnected_agent(sender, registration, claim):
            self._hold(sender, registration, now)
        elif self._has_other_size(sender, registration):
            self.peers.hold(sender, registration)
            self._connections.close(engine_id, OTHER_SIZE)
        else:
            if sender in self._connections.agents(engine_id):
                self._connections.found_at(address_of(registration))
            self.peers.engine_alive(address_of(registration), now)
            reachable = self._is_here(registration) or bool(self._connections.agents(engine_id))
            self._handle(claim, protocol.Registered(sender, registration, reachable, self._is_busy(claim)), now)

    def on_cancel(self, sender: str, message: Cancel, now: float) -> None:
        """A decode engine cancels a registration: it wants the blocks back."""
        self._take_arrivals(now)
        claim = self._claims.get(message.key)
        if self._is_foreign(sender, claim):
            self._peer_errors.count("foreign cancel", f"agent {sender} cancels {message.request_id}, not its own", now)
        elif self._connections.closing(message.decode_engine_id) is None:  # else it asks again later
            self.peers.engine_alive(address_of(message), now)
            self._handle(claim, protocol.CancelledByD(message, self._is_busy(claim)), now)

    def on_unregister(self, sender: str, message: Unregister, now: float) -> None:
        """A decode engine takes a registration back, and will register again. A push that has begun goes on."""
        claim = self._claims.get(message.key)
        if self._is_foreign(sender, claim):
            text = f"agent {sender} unregisters {message.request_id}, not its own"
            self._peer_errors.count("foreign unregister", text, now)
        elif self._connections.closing(message.decode_engine_id) is None:
            self._handle(claim, protocol.Withdrawn(message), now)

    def on_decline(self, message: Decline, now: float) -> None:
        """A decode engine will not load a request. If it has registered the request, the registration counts."""
        self._take_arrivals(now)
        claim, keys = self._claims.get(message.key), self._pairing.keys(message)
        over = [each for each in self._prompts.over(keys, now) if not each.renewed]
        if claim.state is State.IDLE and not self._is_here(message) and self._pairing.match(message, over):
            for each in over:
                self._prompts.request_answered(each)
        else:
            self._handle(claim, protocol.Declined(message), now)

    def on_ping(self, sender: str, message: Ping) -> None:
        """A peer asks for a ``Pong``."""
        self.peers.pong(sender, message)

    # From the engine's scheduler.

    def requests_arrived(self, requests: Sequence[Arrived]) -> None:
        """These requests have come to the engine. They may wait in its queue. Main thread, before their first step is
        announced.
        """
        self._arrived.append(requests)

    def _take_arrivals(self, now: float) -> None:
        """Note the requests that have come; P may connect to the decode engines that have registered them."""
        while self._arrived:
            prompts = [self._prompts.request_arrived(request) for request in self._arrived.popleft()]
            for claim in [each for prompt in prompts for each in self._claims.waiting_for(prompt, now)]:
                self._handle(claim, protocol.RequestArrived(), now)

    def rank_is_other(self, request_id: str, rank: int, now: float) -> None:
        """A request went to another data-parallel ``rank``. A decode engine that has registered it here, or does so
        soon, has been given the wrong rank.
        """
        reason = f"the request went to data-parallel rank {rank} of the prefill engine"
        prompt = self._prompts.get(request_id)
        self._prompts.rank_is_other(prompt, reason, now)
        self._refuse_claims_for(prompt, reason, now)

    def request_refused(self, request_id: str, transfer_id: str | None, now: float) -> None:
        """The front end has refused a request: it does not come. A request of its name that is here is another one."""
        self._take_arrivals(now)
        prompt = PromptRequest(request_id, transfer_id)
        for claim in [*self._claims.waiting_with(prompt, now), *self._claims.unwanted_for(prompt, now)]:
            named = claim.named
            if named is None or self._is_here(named):
                continue
            if claim.state is State.UNWANTED:
                self._prompts.request_answered(prompt)
                self._handle(claim, protocol.Dropped(), now)
            elif self._pairing.is_for(named, prompt) or self._pairing.is_spare_answer(named, [prompt]):
                self._prompts.request_answered(prompt)
                if claim.registration is not None and claim.registration.layerpush:
                    self._refuse(claim, REFUSED, now)
        self._prompts.request_ended(prompt, REFUSED, now)

    def may_lapse(self, request_id: str) -> bool:
        """Whether heartbeats must not prolong a request's lease: no decode engine has registered it, and a registered
        prompt waits for blocks. Any thread.
        """
        return self._prompt_waits and self._pushes.is_computed(request_id)

    # From the writer.

    def take_registration(self, request_id: str, now: float) -> Registration | None:
        """A request has begun. Returns the registration that came before it, if one did: the one that names it exactly,
        else the newest that may mean it, because a router that tries again leaves older ones behind. Stock engines
        never cancel these.
        """
        self._take_arrivals(now)
        prompt = self._prompts.request_began(request_id)
        for claim in self._claims.waiting_with(prompt):
            if claim.named is not None and self._pairing.is_misnamed(claim.named, prompt):
                self._refuse(claim, OTHER_PROMPT, now)
            elif claim.named is not None and self._pairing.is_spare_answer(claim.named, [prompt]):
                self._refuse(claim, SPARE_ANSWER, now)
        meant = [(claim, claim.registration) for claim in self._claims.waiting_for(prompt, now) if claim.registration]
        if not meant:
            return None
        exact = [each for each in meant if request_id in (each[1].request_id, each[1].prefill_request_id)]
        taken, registration = (exact or meant)[-1]
        self._prompts.request_answered(prompt)
        self._handle(taken, protocol.Matched(), now)
        for claim, other in meant:
            if claim is not taken and not other.layerpush:
                self._handle(claim, protocol.Dropped(), now)
        return registration

    def is_unwanted(self, request_id: str, now: float) -> bool:
        """Whether D cancelled or declined this request, or P refused its registration, before the request was there."""
        self._take_arrivals(now)
        prompt = self._prompts.get(request_id)
        for claim in self._claims.unwanted_for(prompt, now)[:1]:
            self._prompts.request_answered(prompt)
            self._handle(claim, protocol.Dropped(), now)
            return True
        return False

    def refusal(self, registration: Registration) -> str | None:
        """The reason why nothing may be written to the connected engine for this registration; None if something may.

        Its connection is closing, or it is not the process that sent the registration: an engine that was restarted
        under its old name has given these blocks to other requests.
        """
        closing = self._connections.closing(registration.decode_engine_id)
        if closing is not None:
            return closing
        claim = self._claims.get(registration.key)
        agents = self._connections.agents(registration.decode_engine_id)
        return None if claim.is_equal(registration) and not claim.senders.isdisjoint(agents) else RESTARTED

    def report_failure(self, report: ReportFailure, now: float) -> None:
        """Send the decode engine a push's failure: no completion will come."""
        self._handle(self._claims.get(report.registration.key), protocol.PushFailed(report), now)

    def send_first_token(self, action: SendFirstToken, now: float) -> None:
        """Send every rank of the decode engine the first token, or None. The decode engine has asked for it.

        It is sent once. A decode engine that misses it computes the token itself.
        """
        registration = action.registration
        if registration.layerpush:
            self._answer(registration, FirstToken(registration.request_id, action.token, action.other), now)

    def push_ended(self, request_id: str, failure: str | None, now: float) -> None:
        """A push is over, or never began. Decode engines that wait for it, or register it soon, get the ``failure``."""
        self._take_arrivals(now)
        prompt = self._prompts.get(request_id)
        for claim in self._claims.unwanted_for(prompt):
            self._prompts.request_answered(prompt)
            self._handle(claim, protocol.Dropped(), now)
        if failure is not None:
            self._refuse_claims_for(prompt, failure, now)
        reason = None if failure is None else f"the prefill request has ended: {failure}"
        self._prompts.request_ended(prompt, reason, now)

    # At times.

    def next_due(self, _now: float) -> float | None:
        """When ``tick`` looks at claims that wait; None: when one comes. It forgets old entries at any later time."""
        times = [self._poll_at] if self.pending else []
        return min([*times, self._queued_at] if self.short_of_blocks else times, default=None)

    def tick(self, now: float) -> None:
        """Forget old entries, and time out claims."""
        self._prompts.expire(now)
        self._forget(self._claims.expire(now), now)
        self._time_out(now)
        self._report_queued(now)
        self.peers.tick(now)

    def _time_out(self, now: float) -> None:
        begun, running = self._steps()
        self._take_arrivals(now)
        self._prompts.count_steps(begun, running, now)
        if not self.pending or now < self._poll_at:
            return
        self._poll_at = now + POLL_EVERY_S
        self._time_out_older(self._unknown_timeout_s, lambda named: not self._is_here(named), NO_REQUEST, now)
        self._time_out_older(
            OTHER_PROMPT_S, lambda named: isinstance(named, Registration) and named.prefix_tokens > 0, NOT_KEPT, now
        )
        prompts = {claim.key for prompt in self._prompts for claim in self._claims.waiting_with(prompt)}
        self._time_out_older(
            OTHER_PROMPT_S, lambda named: named.key in prompts and self._wants_other_prompt(named), OTHER_PROMPT, now
        )

    def _time_out_older(self, age_s: float, is_hopeless: Callable[[Named], bool], reason: str, now: float) -> None:
        left = TIMED_OUT_AT_ONCE
        for since, claim in self._claims.waiting.older_than(age_s, now):
            if not self._prompts.is_complete(since, now):
                return
            if claim.registration is not None and claim.registration.layerpush and is_hopeless(claim.registration):
                if not left:
                    self._poll_at = now  # the next tick goes on
                    return
                left -= 1
                self._log_refusal(claim, reason, now)
                self._handle(claim, protocol.TimedOut(reason), now)

    def _wants_other_prompt(self, named: Named) -> bool:
        """Whether there are requests of its name, and every one has another prompt."""
        found = [each for each in self._prompts.live(self._pairing.keys(named)) if self._pairing.is_named(named, each)]
        return bool(found) and all(self._pairing.prompts_differ(named, each) for each in found)

    def _report_queued(self, now: float) -> None:
        """The engine is full. If a registered prompt waits, prompts that nobody has registered give way: their decode
        engines may need the blocks that wait for this one.
        """
        if not self.short_of_blocks:
            self._prompt_waits = False
        elif now >= self._queued_at:
            self._queued_at = now + QUEUED_EVERY_S
            self._take_arrivals(now)
            waiting = [each for each in self._prompts if each.state is PromptState.QUEUED]
            queued = {claim.key: claim for each in waiting for claim in self._claims.waiting_for(each, now)}
            self._prompt_waits = bool(queued) or self._pushes.has_registered_prompts
            names = self._names_of(self._pushes.computed()) if queued else ()
            for registration in [claim.registration for claim in queued.values()] if names else ():
                if registration is not None and registration.layerpush >= QUEUED_VERSION:
                    self._answer(registration, Queued(registration.request_id, names), now)

    def _names_of(self, request_ids: list[str]) -> tuple[str, ...]:
        names: set[str] = set()
        for prompt in map(self._prompts.get, request_ids):
            names |= named_prompts([self._pairing.base(prompt.request_id), prompt.transfer_id], prompt.prompt_digest)
        return tuple(sorted(name for name in names if len(name) <= NAMED_CHARS))[:MAX_COMPUTED]

    # Events and actions of claims.

    def _handle(self, claim: Claim, event: Event, now: float) -> None:
        """Its actions may have events in turn, so the table comes first."""
        actions = claim.handle(event, now)
        dropped = self._claims.keep(claim, now)
        for action in actions:
            self.ACTIONS[type(action)](self, claim, action, now)
        self._forget(dropped, now)

    def _forget(self, claims: Iterable[Claim], now: float) -> None:
        """They are dropped: too old, too many or too large."""
        for claim in claims:
            if claim.waits:
                self._refuse(claim, NO_REQUEST, now)
            elif claim.state is State.UNWANTED:
                self._handle(claim, protocol.Dropped(), now)

    def _refuse(self, claim: Claim, reason: str, now: float) -> None:
        self._log_refusal(claim, reason, now)
        self._handle(claim, protocol.Refused(reason), now)

    def _log_refusal(self, claim: Claim, reason: str, now: float) -> None:
        kind = KINDS.get(reason, "refused registration")
        self._peer_errors.count(kind, f"no push for {claim.request_id}: {reason}", now)

    def _refuse_claims_for(self, prompt: PromptRequest, reason: str, now: float) -> None:
        """Unless a decode engine's request has had this one: then they wait for a later one."""
        if prompt.renewed:
            return
        for claim in self._claims.waiting_for(prompt, now):
            if claim.registration is not None and claim.registration.layerpush:
                self._prompts.request_answered(prompt)
                self._refuse(claim, reason, now)

    def _tell(self, _: Claim, action: protocol.Tell, now: float) -> None:
        self._answer(action.registration, action.answer, now)

    def _answer(self, registration: Registration, answer: Answer, now: float) -> None:
        """Only a request that is here is a reason to connect: anybody may name any host in a registration."""
        self.peers.answer(address_of(registration), answer, now, connect=self._is_here(registration))

    def _reply(self, _: Claim, action: protocol.Reply, now: float) -> None:
        self.peers.answer(address_of(action.message), action.answer, now, connect=action.connect)

    def _match(self, claim: Claim, _: protocol.Match, now: float) -> None:
        registration = claim.registration
        assert registration is not None
        keys = self._pairing.keys(registration)
        waiting = [each for each in self._prompts.live(keys) if self._pushes.is_waiting(each.request_id)]
        prompt = self._pairing.match(registration, waiting)
        if prompt is not None:
            self._prompts.request_answered(prompt)
            self._handle(claim, protocol.Matched(), now)
            self._pushes.register(prompt.request_id, registration)
        elif any(self._pairing.is_misnamed(registration, each) for each in waiting):
            self._refuse(claim, OTHER_PROMPT, now)
        elif registration.prefix_tokens:
            given = self._prompts.get(registration.prefill_request_id or "")
            returned = given.state is PromptState.RUNNING and not self._pushes.is_waiting(given.request_id)
            if returned or given.state is PromptState.ENDED:
                self._refuse(claim, given.failure or NOT_KEPT, now)
        elif self._pairing.is_spare_answer(registration, self._prompts.begun_or_ended(keys)):
            self._refuse(claim, SPARE_ANSWER, now)
        elif registration.layerpush:
            name = registration.prefill_request_id or ""
            is_exact = self._pairing.base(name) != name
            reason = self._prompts.get(name).failure if is_exact else None
            reason = reason or self._prompts.take_failure(self._pairing.names(registration), now)
            if reason is not None:
                self._refuse(claim, reason, now)

    def _withdraw(self, claim: Claim, _: protocol.Withdraw, __: float) -> None:
        request_id = self._pushes.serving(claim.key)
        if request_id is None and claim.named is not None:
            given = claim.named.prefill_request_id
            exact = given is not None and self._pairing.base(given) != given
            known = self._prompts.live(self._pairing.keys(claim.named))
            found = self._pairing.match(claim.named, [each for each in known if not exact or each.request_id == given])
            request_id = None if found is None else found.request_id
        if request_id is not None:
            self._on_withdrawn(request_id)

    def _stop_push(self, claim: Claim, action: protocol.StopPush, now: float) -> None:
        request_id = self._pushes.serving(claim.key)
        if request_id is None or self._pushes.cancel(request_id, claim.key):  # else ``report_failure`` follows
            self._handle(claim, protocol.Stopped(action.message), now)

    def _drop_request(self, claim: Claim, _: protocol.DropRequest, now: float) -> None:
        assert claim.named is not None
        known = self._prompts.live(self._pairing.keys(claim.named))
        prompt = self._pairing.match(claim.named, [each for each in known if self._pushes.is_waiting(each.request_id)])
        dropped = prompt is not None and self._pushes.decline(prompt.request_id)
        if dropped and claim.state is State.UNWANTED:  # else the request has ended by now
            self._handle(claim, protocol.Dropped(), now)

    def _report_in_use(self, claim: Claim, action: protocol.ReportInUse, now: float) -> None:
        self._peer_errors.count("id in use", f"agent {action.sender} registers {claim.request_id}: {IN_USE}", now)

    ACTIONS: ClassVar[dict[type[Action], Callable[..., Any]]] = {
        protocol.Tell: _tell,
        protocol.Reply: _reply,
        protocol.Match: _match,
        protocol.Withdraw: _withdraw,
        protocol.StopPush: _stop_push,
        protocol.DropRequest: _drop_request,
        protocol.ReportInUse: _report_in_use,
    }

    def _is_here(self, named: Named) -> bool:
        return bool(self._prompts.live(self._pairing.keys(named)))

    def _is_busy(self, claim: Claim) -> bool:
        return self._pushes.serving(claim.key) is not None

    def _is_foreign(self, sender: str, claim: Claim) -> bool:
        """Whether an agent has no part in a registration."""
        known = self._connections.agents(claim.key[0])
        return claim.registration is not None and sender not in claim.senders and sender not in known

    # Registrations from agents that are no connected rank of their engine.

    def _is_from_unconnected_agent(self, sender: str, registration: Registration, claim: Claim) -> bool:
        known = self._connections.agents(registration.decode_engine_id)
        if not known or sender in known:
            return False
        return claim.state not in (State.SERVED, State.ANSWERED) or not claim.is_equal(registration)

    def _has_other_size(self, sender: str, registration: Registration) -> bool:
        """Whether a connected agent names another number of ranks than somebody did before the handshake."""
        found = self._connections.address(registration.decode_engine_id)
        known = self._connections.agents(registration.decode_engine_id)
        return found is not None and sender in known and found.tp_size != registration.decode_tp_size

    def _hold(self, sender: str, registration: Registration, now: float) -> None:
        engine_id = registration.decode_engine_id
        if not self.peers.hold(sender, registration):
            return
        address = address_of(registration)
        if self._connections.is_elsewhere(address):
            self._connections.reach(address, partial(self._on_decided, address), now, tries=1)
        else:
            self._ask_about(engine_id, next(iter(self._connections.agents(engine_id))), PROBES)

    def _ask_about(self, engine_id: str, agent: str, left: int) -> None:
        self.peers.probe(engine_id, agent, partial(self._on_verdict, engine_id, agent, left))

    def _on_verdict(self, engine_id: str, agent: str, left: int, verdict: Verdict, now: float) -> None:
        if agent not in self._connections.agents(engine_id):  # it was forgotten meanwhile, and may be connected anew
            self._take_held(engine_id, now)
        elif self._connections.closing(engine_id) is not None or not self.peers.holds(engine_id):
            return  # the registrations are taken when the connection is gone
        elif verdict is Verdict.UNKNOWN and left > 1:
            self._ask_about(engine_id, agent, left - 1)
        elif verdict.ended:
            for claim in [each for each in self._claims.waiting if each.key[0] == engine_id]:
                self._handle(claim, protocol.Dropped(), now)
            self._connections.close(engine_id, "the decode engine was restarted")
        else:
            self._reject_held(engine_id, now)

    def _on_decided(self, address: Address, _: str | None, now: float) -> None:
        """It is known whether the engine lives at this address, from which it has registered."""
        if self._connections.is_elsewhere(address):
            self._reject_held(address.engine_id, now)
        else:
            self._take_held(address.engine_id, now)

    def _reject_held(self, engine_id: str, now: float) -> None:
        refused: list[tuple[Registration, Fail]] = []
        for sender, registration, reason in self.peers.reject_held(engine_id, now):
            claim = self._claims.get(registration.key)
            if claim.accepts(protocol.Rejected):
                self._handle(claim, protocol.Rejected(sender, registration, reason), now)
            if isinstance(claim.answer, Fail) and claim.is_equal(registration):
                refused.append((registration, claim.answer))
        self.peers.refuse(refused)

    def _take_held(self, engine_id: str, now: float) -> None:
        for sender, registration in self.peers.take_held(engine_id):
            self.on_registration(sender, registration, now)
