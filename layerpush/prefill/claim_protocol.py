"""The protocol of one claim: a request of a decode engine (D) that asks this prefill rank (P) for KV.

Every rank of D sends an equal registration, but for its contact. The first to come counts for all. P's request may come
before or after it. A claim's key is D's engine and D's id of the request. ``claims`` decides which request of P a claim
means.

``TRANSITIONS`` lists every event that changes something in a state, and every state that it may lead to. ``IGNORED``
lists the events that a state accepts without effect. ``claim_session`` runs on these tables, and
docs/design/protocol.md is drawn from the first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from layerpush.core import wire
from layerpush.core.wire import Cancel, Decline, Registration, Unregister
from layerpush.prefill.push_protocol import ReportFailure


class State(enum.Enum):
    IDLE = "nothing waits for a request, and no answer is kept"
    UNCONNECTED = "waits for its request; P connects to D when the request has come, not before"
    PENDING = "accepted, and waits until its request begins"
    SERVED = "a push serves it, or has completed"
    ANSWERED = "it has its last answer, which copies of the registration get, too"
    UNWANTED = "D has cancelled or declined it, or P has refused it: its request is dropped when it comes"
    WITHDRAWN = "D has taken it back, and may register again with a higher attempt"

    __hash__ = object.__hash__


class Event:
    """Something that happened to a claim."""


@dataclass(frozen=True, slots=True)
class Registered(Event):
    """A rank of D registers. ``reachable``: D is connected, or the request has come, which is a reason to connect.
    ``busy``: a push with this key is not over.
    """

    sender: str
    registration: Registration
    reachable: bool
    busy: bool


@dataclass(frozen=True, slots=True)
class RequestArrived(Event):
    """A request that the claim may mean has come to the engine."""


@dataclass(frozen=True, slots=True)
class Matched(Event):
    """The claim's request has begun: a push serves the claim."""


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """No request will come for the claim, or it has ended, or has waited for too long."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejected(Event):
    """Another engine has the name of the one that registers."""

    sender: str
    registration: Registration
    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut(Event):
    """The claim's request has not come in time. If it comes yet, it is dropped. A stock D's claim does not time out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Dropped(Event):
    """A waiting claim is not needed: a newer one has its request, or its process is gone. An unwanted one has done its
    task, or is too old.
    """


@dataclass(frozen=True, slots=True)
class CancelledByD(Event):
    """D wants its blocks back. ``busy``: see ``Registered``."""

    message: Cancel
    busy: bool


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """The push has stopped: no WRITE for the claim is or will be on the wire."""

    message: Cancel


@dataclass(frozen=True, slots=True)
class Withdrawn(Event):
    """D takes its registration back, and will register again."""

    message: Unregister


@dataclass(frozen=True, slots=True)
class Declined(Event):
    """D will not load the request."""

    message: Decline


@dataclass(frozen=True, slots=True)
class PushFailed(Event):
    """The claim's push will send no completion."""

    report: ReportFailure


Answer = wire.Accepted | wire.FirstToken | wire.Fail | wire.Cancelled | wire.Queued | wire.Unregistered


class Action:
    """A task that a session gives to ``Claims``."""


@dataclass(frozen=True, slots=True)
class Tell(Action):
    """Send ``answer`` to every rank of the engine that registered."""

    registration: Registration
    answer: Answer


@dataclass(frozen=True, slots=True)
class Reply(Action):
    """Send ``answer`` to every rank of the engine that sent ``message``; ``connect``: even if it takes a handshake."""

    message: Cancel | Unregister
    answer: Answer
    connect: bool


@dataclass(frozen=True, slots=True)
class Match(Action):
    """Look for the claim's request among those that have begun; `Matched` or `Refused` may follow."""


@dataclass(frozen=True, slots=True)
class Withdraw(Action):
    """Tell the scheduler that the claim's request, if it is here, is not wanted any more."""


@dataclass(frozen=True, slots=True)
class StopPush(Action):
    """Stop the claim's push; `Stopped` or `PushFailed` follows."""

    message: Cancel


@dataclass(frozen=True, slots=True)
class DropRequest(Action):
    """Drop the declined request if its prefill has ended; then `Dropped` follows."""


@dataclass(frozen=True, slots=True)
class ReportInUse(Action):
    """Count a peer error: this agent registers another request under the key of one that is being pushed."""

    sender: str


S = State
_WAITING = {S.UNCONNECTED, S.PENDING}
_SPENT = {S.ANSWERED, S.WITHDRAWN, S.IDLE}

TRANSITIONS: Mapping[State, Mapping[type[Event], set[State]]] = {
    S.IDLE: {
        Registered: {S.IDLE, *_WAITING}, CancelledByD: {S.ANSWERED}, Withdrawn: {S.IDLE, S.WITHDRAWN},
        Declined: {S.IDLE, S.UNWANTED}, Rejected: {S.IDLE, S.ANSWERED},
    },
    S.UNCONNECTED: {
        Registered: _WAITING, RequestArrived: {S.PENDING}, Matched: {S.SERVED}, Refused: {S.ANSWERED, S.IDLE},
        TimedOut: {S.UNWANTED}, Dropped: {S.IDLE}, CancelledByD: {S.UNWANTED},
        Withdrawn: {S.UNCONNECTED, S.WITHDRAWN},
    },
    S.PENDING: {
        Registered: _WAITING, Matched: {S.SERVED}, Refused: {S.ANSWERED, S.IDLE},
        TimedOut: {S.UNWANTED}, Dropped: {S.IDLE}, CancelledByD: {S.UNWANTED}, Withdrawn: {S.PENDING, S.WITHDRAWN},
    },
    S.SERVED: {
        Registered: {S.SERVED, *_WAITING}, CancelledByD: {S.SERVED, S.ANSWERED}, Stopped: {S.ANSWERED},
        PushFailed: {S.SERVED, S.ANSWERED, S.PENDING},
    },
    S.ANSWERED: {
        Registered: {S.ANSWERED, *_WAITING}, CancelledByD: {S.ANSWERED}, Stopped: {S.ANSWERED},
        Withdrawn: {S.ANSWERED}, Declined: {S.ANSWERED, S.UNWANTED},
    },
    S.UNWANTED: {
        Registered: {S.UNWANTED, *_WAITING}, CancelledByD: {S.UNWANTED}, Withdrawn: {S.UNWANTED},
        Declined: {S.UNWANTED}, Dropped: _SPENT,
    },
    S.WITHDRAWN: {
        Registered: {S.WITHDRAWN, *_WAITING}, CancelledByD: {S.ANSWERED}, Withdrawn: {S.WITHDRAWN},
        Declined: {S.UNWANTED},
    },
}  # fmt: skip

IGNORED: Mapping[State, set[type[Event]]] = {
    S.UNCONNECTED: {Declined},
    S.PENDING: {RequestArrived, Declined},
    S.SERVED: {Withdrawn, Declined},
}
