"""A claim and its surroundings: the moves of a decode engine, of P's request and of a push, and the rules.

``ClaimWorld`` plays D, P's request and the writer for one claim, keeps its own account of what D gets, and checks
every action against that account. The rules have numbers; those of ``claim_session`` are the first five.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from layerpush.core.wire import Accepted, Cancel, Cancelled, Decline, Fail, Registration, Unregister, Unregistered
from layerpush.prefill import claim_protocol as protocol
from layerpush.prefill.claim_protocol import Event, Reply, State, StopPush, Tell
from layerpush.prefill.claim_session import Claim
from layerpush.prefill.push_protocol import ReportFailure
from tests.unit import builders

FIRST = builders.registration([1, 2], layerpush=2)
OTHER = builders.registration([3, 4], layerpush=2)
AGAIN = replace(FIRST, local_block_ids=((5, 6),), attempt=1)
SENT = (FIRST, OTHER, AGAIN)
"""In the order in which D's processes send them: ``OTHER`` is a successor's, or another request's, with D's old id."""
AGENTS = ("d-0", "d-1")
ADDRESS = FIRST.decode_engine_id, FIRST.decode_host, FIRST.decode_port, FIRST.decode_tp_size


@dataclass
class ClaimWorld:
    stock: bool = False
    claim: Claim = field(default_factory=lambda: Claim(FIRST.key))
    sent: int = -1
    """The newest of ``SENT`` that D has sent."""
    connected: bool = False
    here: bool = False
    """P's request has come, and no push serves D with it yet."""
    begun: bool = False
    failed: bool = False
    """P's request has failed: a registration is refused."""
    push: Literal["none", "writes", "stops", "drained"] = "none"
    """Of this claim. "stops": D has cancelled it. "drained": it is over but for the scheduler."""
    pushed: Registration | None = None
    over: list[Registration] = field(default_factory=list)
    """Registrations that D knows the end of."""
    last: object = None
    """The last answer that counts for copies of ``counts``."""
    counts: Registration | None = None
    received: set[tuple[int, str]] = field(default_factory=set)
    """The registrations that have come, by number, each with its agent."""
    undrained: bool = False
    cancelled: int = 0
    """Messages `Cancelled` to D."""

    @property
    def state(self) -> State:
        return self.claim.state

    @property
    def busy(self) -> bool:
        return self.push != "none"

    def registration(self, number: int) -> Registration:
        return replace(SENT[number], layerpush=0) if self.stock else SENT[number]

    @property
    def tries_again(self) -> bool:
        """D registers again once its registration was given back."""
        return SENT[self.sent] == AGAIN or (isinstance(self.last, Unregistered) and self.sent >= 0)

    # Moves.

    def register(self, number: int, agent: str) -> None:
        self.sent = max(self.sent, number)
        registration, before = self.registration(number), self.facts()
        refused = self.busy and self.counts != registration
        late = isinstance(self.last, Unregistered) and registration.attempt <= self.last.attempt
        self.received.add((number, agent))
        self.send(protocol.Registered(agent, registration, self.connected or self.here, self.busy))
        if refused:
            assert self.facts() == before, "3: another registration changes nothing while a push is not over"
        elif late:
            assert self.facts() == before, "1: only a higher attempt opens a claim that was taken back"
        elif self.claim.registration is not None and self.claim.is_equal(registration):
            self.counts = registration
        counting = [each for each in range(len(SENT)) if self.claim.is_equal(self.registration(each))]
        offers = {(each, agent) for each in counting for agent in self.claim.senders}
        assert offers <= self.received, "7: only agents that have sent the registration count"

    def connect(self) -> None:
        """For another request of D."""
        self.connected = True

    def come(self) -> None:
        self.here = True
        if self.claim.waits:
            self.send(protocol.RequestArrived())

    def begin(self) -> None:
        """P may have forgotten that the request came."""
        self.begun = self.here = True
        if self.claim.waits:
            self.match()

    def match(self) -> None:
        """The request that has begun is the claim's."""
        registration = self.claim.registration
        assert registration is not None
        assert registration.blocks, "8: a claim that waits has its blocks"
        assert registration not in self.over, "1: no push begins once D knows the end"
        self.send(protocol.Matched())
        self.push, self.pushed, self.here, self.begun, self.undrained = "writes", registration, False, False, False

    def lose_request(self) -> None:
        """The request fails, or is aborted. A stock D's claim waits on."""
        self.here, self.begun, self.failed = False, False, True
        if self.claim.waits and not self.stock:
            self.send(protocol.Refused("aborted"))

    def refuse(self) -> None:
        """It is a spare answer, or one of too many."""
        self.send(protocol.Refused("too many"))

    def time_out(self) -> None:
        self.send(protocol.TimedOut("no such request"))

    def reject(self) -> None:
        """Another engine has D's name."""
        self.sent = max(self.sent, 0)
        registration = self.registration(0)
        self.received.add((0, AGENTS[0]))
        self.send(protocol.Rejected(AGENTS[0], registration, "two engines"))
        if not self.stock:
            self.counts = registration
            self.ends(self.claim.answer)

    def drop(self) -> None:
        self.send(protocol.Dropped())

    def cancel(self) -> None:
        """It may overtake the registration."""
        self.sent = max(self.sent, 0)
        self.send(protocol.CancelledByD(Cancel(FIRST.request_id, *ADDRESS), self.busy))

    def take_back(self, attempt: int) -> None:
        """It may overtake the registration."""
        self.sent = max(self.sent, 2 * attempt)
        self.send(protocol.Withdrawn(Unregister(FIRST.request_id, *ADDRESS, attempt)))

    def decline(self, *, ended: bool) -> None:
        """``ended``: the prefill has, so the request is dropped at once."""
        before = self.state
        self.send(protocol.Declined(Decline(FIRST.request_id, FIRST.decode_engine_id)))
        if ended and before is not State.UNWANTED and self.state is State.UNWANTED:
            self.drop()

    def fail(self, *, drained: bool, reason: str = "cut off") -> None:
        """The push fails."""
        assert self.pushed is not None
        cancelled = self.push == "stops"
        self.push, self.undrained = "drained" if drained else self.push, not drained
        self.send(protocol.PushFailed(ReportFailure(self.pushed, 0, reason, drained, cancelled)))
        assert drained or self.claim.answer is None, "4: a failure that is not drained is not the last word"

    def complete(self) -> None:
        """D has its completion, and the scheduler holds the request yet."""
        self.push = "drained"

    def close(self) -> None:
        self.push, self.pushed = "none", None

    # Their consequences.

    def send(self, event: Event) -> None:
        for action in self.claim.handle(event, 0.0):
            if isinstance(action, Tell):
                self.check_tell(action)
            elif isinstance(action, Reply):
                self.check_reply(action)
            elif isinstance(action, protocol.Match):
                self.matched()
            elif isinstance(action, StopPush):
                assert self.busy
                if self.push == "drained":
                    self.send(protocol.Stopped(action.message))
                else:
                    self.push = "stops"
        registration = self.claim.registration
        if registration is not None:
            assert bool(registration.blocks) == self.claim.waits, "8: blocks are kept only while it waits"

    def matched(self) -> None:
        self.counts, self.last = self.claim.registration, None
        if self.begun:
            self.match()
        elif self.failed and not self.stock:
            self.send(protocol.Refused("it has failed"))

    def check_tell(self, action: Tell) -> None:
        registration, answer = action.registration, action.answer
        assert not self.stock, "5: a stock D gets no answer"
        if isinstance(answer, Accepted):
            assert registration not in self.over, "6: nothing is accepted after its end"
            return
        in_use = self.busy and self.pushed != registration
        if isinstance(answer, Fail) and not answer.drained:
            assert self.push in ("writes", "stops")
            return
        assert in_use or self.push in ("none", "drained"), "2: blocks are free only without WRITEs"
        if in_use:
            self.over.append(registration)
            return
        if registration == self.counts and self.last is not None:
            assert answer == self.last, "4: a copy gets the last answer"
        self.ends(answer)

    def check_reply(self, action: Reply) -> None:
        assert self.push in ("none", "drained"), "2: blocks are free only without WRITEs"
        self.cancelled += isinstance(action.answer, Cancelled)
        self.ends(action.answer)

    def ends(self, answer: object) -> None:
        self.last = answer
        meant = [each for each in map(self.registration, range(self.sent + 1)) if each not in self.over]
        if isinstance(answer, Unregistered):
            meant = [each for each in meant if each.attempt <= answer.attempt]
        self.over += meant

    def facts(self) -> tuple[object, ...]:
        """What decides over pushes and answers."""
        claim = self.claim
        return claim.state, claim.registration, claim.answer, claim.senders
