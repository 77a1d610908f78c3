"""The protocol of one push: its states, its events, its actions.

``TRANSITIONS`` lists every event that changes something in a state, and every state that it may lead to. ``IGNORED``
lists the events that a state accepts without effect. ``push_session`` runs on these tables, and
docs/design/protocol.md is drawn from the first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from layerpush.core.first_token import Sampled
from layerpush.core.pieces import Pieces
from layerpush.core.replica import Replica
from layerpush.core.step_plan import ChunkPlan
from layerpush.core.wire import Registration
from layerpush.core.write import Write


class State(enum.Enum):
    WAITING = "prefill runs, no decode engine has registered"
    CONNECTING = "registered, the handshake is under way"
    STREAMING = "layers are written as they become ready"
    REWINDING = "preempted or taken back: WRITEs of the old epoch must end first"
    UNCONFIRMED = "everything landed, vLLM may still take the last step back"
    NOTIFYING = "everything landed, the completion is being sent"
    NOTIFIED = "the completion was sent; the scheduler still holds the request"
    DEFERRED = "will be pushed whole when prefill has finished"
    WHOLE = "handed to vLLM, which pushes the request whole"
    WRITING_WHOLE = "vLLM's WRITEs of the whole request are on the wire"
    DRAINING = "failed or aborted: WRITEs in flight must end first"
    ABANDONED = "failed and drained; the scheduler still holds the request"
    CLOSED = "nothing is left to do"

    __hash__ = object.__hash__  # a state is looked up for each event, and ``Enum`` hashes the name in Python


class Event:
    """Something that happened to a push."""


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """The scheduler gave this step a chunk of the prompt."""

    chunk: ChunkPlan


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """A layer's KV of a chunk is in this engine's memory."""

    epoch: int
    chunk: int
    layer: int


@dataclass(frozen=True, slots=True)
class PostReady(Event):
    """All ready layers have been reported: post them. ``wait``: only if every layer of a chunk is ready."""

    wait: bool = False


@dataclass(frozen=True, slots=True)
class Registered(Event):
    """A decode engine asks for this request."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Connected(Event):
    """The decode engine is reachable, and we can write into its blocks. ``replicas``: this rank's part of them in each
    KV cache group; empty: all. ``pieces``: they have another size than ours. ``whole``: prefill has ended, and this is
    the whole prompt; vLLM cannot push it.
    """

    replicas: tuple[Replica, ...] = ()
    pieces: Pieces | None = None
    whole: ChunkPlan | None = None


@dataclass(frozen=True, slots=True)
class LinkRefused(Event):
    """The decode engine is reachable but its blocks cannot be written layer by layer."""


@dataclass(frozen=True, slots=True)
class WriteLanded(Event):
    """A WRITE is in the memory of every decode rank."""

    write: int


@dataclass(frozen=True, slots=True)
class PrefixReported(Event):
    """The decode engine was told that all layers of the prompt have landed up to this chunk of this epoch."""

    chunk: int


@dataclass(frozen=True, slots=True)
class WriteLost(Event):
    """A WRITE ended without landing, or was never posted."""

    write: int
    reason: str


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The push cannot go on: no handshake, no completion sent, broken bookkeeping. ``void``: even what the decode
    engine was told of may be wrong.
    """

    reason: str
    void: bool = False


@dataclass(frozen=True, slots=True)
class Notified(Event):
    """The completion was sent to every decode rank of this session."""


@dataclass(frozen=True, slots=True)
class WholePosted(Event):
    """vLLM's whole push has put a WRITE on the wire: `WriteLanded` or `WriteLost` of ``WHOLE`` follows."""


@dataclass(frozen=True, slots=True)
class CancelledByD(Event):
    """The decode engine wants its blocks back."""


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """The scheduler took the request's blocks away; it will be computed again."""

    reason: ClassVar[str] = "preempted"


@dataclass(frozen=True, slots=True)
class Rewound(Event):
    """The scheduler took steps of the request back: blocks were lost that another connector had to load for them."""

    reason: ClassVar[str] = "taken back"


@dataclass(frozen=True, slots=True)
class ResultsAccepted(Event):
    """The scheduler has accepted the results of every step of the prompt: none of them can be taken back."""


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The scheduler finished the request and holds its blocks under a lease. ``sampled``: its first token, if any."""

    sampled: Sampled | None = None


@dataclass(frozen=True, slots=True)
class Aborted(Event):
    """The scheduler dropped the request and freed its blocks."""

    reason: ClassVar[str] = "aborted"


@dataclass(frozen=True, slots=True)
class LeaseExpired(Event):
    """The lease is over: the blocks are free."""

    reason: ClassVar[str] = "its lease ran out"


Outcome = Literal["pending", "completed", "cancelled", "failed"]


class Action:
    """A task that a session gives to its push."""


@dataclass(frozen=True, slots=True)
class Connect(Action):
    """Connect to the decode engine; `Connected`, `LinkRefused` or `Failed` follows."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Post(Action):
    """Post one WRITE to every decode rank; `WriteLanded` or `WriteLost` follows."""

    write: Write


@dataclass(frozen=True, slots=True)
class Notify(Action):
    """Send the completion to every decode rank; `Notified` or `Failed` follows."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class ReportPrefix(Action):
    """Tell every decode rank that all layers of the prompt's first ``tokens`` tokens have landed, up to this chunk;
    `PrefixReported` follows, unless the blocks that they were written from have been taken away meanwhile.
    """

    registration: Registration
    chunk: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SendFirstToken(Action):
    """Send the decode engine the token that was sampled after the prompt. None: no token fits its request, whose
    sampling parameters ``other`` differ.
    """

    registration: Registration
    token: int | None
    other: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PushWhole(Action):
    """Hand the request to vLLM's whole push, with the registration if one is known."""

    registration: Registration | None


@dataclass(frozen=True, slots=True)
class ReportFailure(Action):
    """Report to the decode engine that this epoch's completion will never come.

    ``drained``: none of our WRITEs for it is on the wire, so the decode engine may use its blocks again.
    ``cancelled``: the decode engine has cancelled its registration. ``void``: what it was told of may be wrong.
    """

    registration: Registration
    epoch: int
    reason: str
    drained: bool
    cancelled: bool = False
    void: bool = False


@dataclass(frozen=True, slots=True)
class ReportRewind(Action):
    """Report that steps were taken back after the completion: the decode engine may have wrong KV."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Release(Action):
    """Report the request as sent: the scheduler may free its blocks."""


S = State
_ANY_ENDING = {S.DRAINING, S.ABANDONED, S.CLOSED}
_DROPPED = {S.DRAINING, S.CLOSED}
_GIVEN_UP = {S.ABANDONED, S.CLOSED}

TRANSITIONS: Mapping[State, Mapping[type[Event], set[State]]] = {
    S.WAITING: {
        Planned: {S.WAITING}, Ready: {S.WAITING}, Preempted: {S.WAITING}, Rewound: {S.WAITING},
        ResultsAccepted: {S.WAITING}, Registered: {S.CONNECTING, S.DEFERRED}, Finished: {S.WHOLE},
        Aborted: {S.CLOSED}, LeaseExpired: {S.CLOSED}, Failed: {S.ABANDONED},
    },
    S.CONNECTING: {
        Planned: {S.CONNECTING}, Ready: {S.CONNECTING}, Preempted: {S.CONNECTING}, Rewound: {S.CONNECTING},
        ResultsAccepted: {S.CONNECTING}, Connected: {S.STREAMING}, LinkRefused: {S.DEFERRED, S.WHOLE},
        Failed: _GIVEN_UP, CancelledByD: _GIVEN_UP, Finished: {S.CONNECTING}, Aborted: {S.CLOSED},
        LeaseExpired: {S.CLOSED},
    },
    S.STREAMING: {
        Planned: {S.STREAMING, S.REWINDING}, Ready: {S.STREAMING},
        PostReady: {S.STREAMING, S.UNCONFIRMED, S.NOTIFYING}, WriteLanded: {S.STREAMING, S.UNCONFIRMED, S.NOTIFYING},
        WriteLost: _ANY_ENDING, Failed: _ANY_ENDING, CancelledByD: _ANY_ENDING, ResultsAccepted: {S.STREAMING},
        Preempted: {S.STREAMING, S.REWINDING}, Rewound: {S.STREAMING, S.REWINDING}, Finished: {S.STREAMING},
        Aborted: _DROPPED, LeaseExpired: _DROPPED, PrefixReported: {S.STREAMING},
    },
    S.REWINDING: {
        Planned: {S.REWINDING}, Ready: {S.REWINDING}, Preempted: {S.REWINDING}, Rewound: {S.REWINDING},
        ResultsAccepted: {S.REWINDING}, WriteLanded: {S.REWINDING, S.STREAMING}, WriteLost: _ANY_ENDING,
        Failed: {S.DRAINING}, CancelledByD: {S.DRAINING}, Finished: {S.REWINDING}, Aborted: {S.DRAINING},
        LeaseExpired: {S.DRAINING},
    },
    S.UNCONFIRMED: {
        ResultsAccepted: {S.NOTIFYING}, Finished: {S.NOTIFYING},
        Planned: {S.STREAMING}, Preempted: {S.STREAMING}, Rewound: {S.STREAMING},
        Failed: {S.ABANDONED}, CancelledByD: {S.ABANDONED}, Aborted: {S.CLOSED}, LeaseExpired: {S.CLOSED},
    },
    S.NOTIFYING: {
        Notified: {S.NOTIFIED, S.CLOSED}, Failed: _GIVEN_UP,
        Preempted: {S.STREAMING}, Rewound: {S.STREAMING}, Aborted: {S.CLOSED}, LeaseExpired: {S.CLOSED},
    },
    S.NOTIFIED: {
        Planned: {S.NOTIFIED}, Preempted: {S.NOTIFIED}, Rewound: {S.NOTIFIED},
        Finished: {S.CLOSED}, Aborted: {S.CLOSED}, LeaseExpired: {S.CLOSED},
    },
    S.DEFERRED: {
        Finished: {S.WHOLE}, Failed: {S.ABANDONED}, CancelledByD: {S.ABANDONED},
        Aborted: {S.CLOSED}, LeaseExpired: {S.CLOSED},
    },
    S.WHOLE: {
        Registered: {S.WHOLE}, WholePosted: {S.WRITING_WHOLE}, Connected: {S.STREAMING}, Failed: {S.CLOSED},
        CancelledByD: {S.CLOSED}, LeaseExpired: {S.CLOSED}, Aborted: {S.CLOSED},
    },
    S.WRITING_WHOLE: {
        WholePosted: {S.WRITING_WHOLE}, WriteLanded: {S.CLOSED}, WriteLost: {S.CLOSED}, Failed: {S.DRAINING},
        CancelledByD: {S.DRAINING}, LeaseExpired: {S.DRAINING}, Aborted: {S.DRAINING},
    },
    S.DRAINING: {
        WriteLanded: _ANY_ENDING, WriteLost: _ANY_ENDING,
        CancelledByD: {S.DRAINING}, Finished: {S.DRAINING}, Aborted: {S.DRAINING}, LeaseExpired: {S.DRAINING},
    },
    S.ABANDONED: {Finished: {S.CLOSED}, Aborted: {S.CLOSED}, LeaseExpired: {S.CLOSED}},
    S.CLOSED: {},
}  # fmt: skip

_PREFILL_GOES_ON = {Planned, Ready, Preempted, Rewound}

IGNORED: Mapping[State, set[type[Event]]] = {
    S.NOTIFIED: {Ready},
    S.DEFERRED: _PREFILL_GOES_ON,
    S.DRAINING: {*_PREFILL_GOES_ON, Failed},
    S.ABANDONED: _PREFILL_GOES_ON,
}
