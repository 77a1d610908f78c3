"""The protocol of one load on one decode rank: its states, its events, its actions.

A decode engine (D) registers a request with a prefill engine (P), and P's ranks write into the request's blocks. Each
P rank that was sent the registration is an *agent*: the NIXL agent of one process. An agent may write until it has
its ``FinalStatus``. The blocks belong to D's engine again when no agent may write.

An engine of several ranks has a load on each. The scheduler sends an event to all of them once, and they may be in
different states: one rank still connects while another has its answers.

``TRANSITIONS`` lists every event that changes something in a state, and every state that it may lead to. ``IGNORED``
lists the events that a state accepts without effect. ``load_session`` runs on these tables, and the documentation is
drawn from the first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from layerpush.core.first_token import Missing


class State(enum.Enum):
    REGISTERING = "this rank has not sent the registration yet: it connects to the prefill engine"
    POSTPONED = "as `REGISTERING`, and the engine needs the blocks: the rank registers, and unregisters at once"
    WAITING = "registered: prefill ranks may write"
    UNREGISTERING = "prefill ranks are asked to drop the registration: one that has begun may write, and goes on"
    CANCELLING = "the load has failed: prefill ranks are asked to stop, and may still write"
    ABORTING = (
        "the engine aborted the request and holds its blocks: prefill ranks are asked to stop, and may still write"
    )
    LOADED = "every byte is there; the prefill engine's first token is on its way"
    PARKED = "the load was reported as failed and its blocks are parked: prefill ranks may still write"
    CLOSED = "no prefill rank writes any more"


class FinalStatus(enum.Enum):
    """How an agent's part of a load ended. After it, no WRITE of this agent is or will be on the wire."""

    LANDED = "it wrote everything"
    FAILED = "it gave up, and its WRITEs have ended"
    CANCELLED = "it was asked to stop, and its WRITEs have ended"
    UNREGISTERED = "it dropped the registration before it had begun"
    GONE = "its process is known to be dead"


class Event:
    """Something that happened to a load."""


@dataclass(frozen=True, slots=True)
class Registered(Event):
    """The registration was sent to these agents, or to some of them."""

    agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class RegistrationFailed(Event):
    """The registration could not be sent to any agent."""

    reason: str


@dataclass(frozen=True, slots=True)
class AgentCompleted(Event):
    """Everything that this agent had to write has landed; ``needed`` agents must complete their part."""

    agent: str
    needed: int


@dataclass(frozen=True, slots=True)
class TokenPromised(Event):
    """This agent will send a `FirstToken`: the prefill engine's first token, or None."""

    agent: str


@dataclass(frozen=True, slots=True)
class TokenArrived(Event):
    """This agent's first token of the prompt; None: the prefill engine has none that fits the request."""

    agent: str
    token: int | None


@dataclass(frozen=True, slots=True)
class PrefixWritten(Event):
    """This agent has written its part of the prompt's first ``tokens`` tokens, and will not write there again."""

    agent: str
    tokens: int


@dataclass(frozen=True, slots=True)
class AgentFailed(Event):
    """This agent will not complete the push; ``drained``: none of its WRITEs is on the wire. ``void``: what it has
    written is wrong, or it doubts that, so nothing of the load is kept.
    """

    agent: str
    reason: str
    drained: bool
    void: bool = False


@dataclass(frozen=True, slots=True)
class AgentCancelled(Event):
    """This agent answered a `Cancel`: no WRITE of it is or will be on the wire."""

    agent: str


@dataclass(frozen=True, slots=True)
class GaveWay(Event):
    """The engine needs the blocks for another request: it will register this one again."""


@dataclass(frozen=True, slots=True)
class AgentUnregistered(Event):
    """This agent has dropped the registration, and has posted no WRITE for it."""

    agent: str


@dataclass(frozen=True, slots=True)
class AgentGone(Event):
    """The agent's process is dead."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class AgentSilent(Event):
    """Nothing has come from this agent for too long. It may be alive, and it may write."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class Aborted(Event):
    """The engine aborted the request. It holds the blocks until the load is reported as over."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut(Event):
    """The registration's deadline has passed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""


class Action:
    """A task that a session gives to its load."""


@dataclass(frozen=True, slots=True)
class SendCancel(Action):
    """Ask these agents to stop; `AgentCancelled`, `AgentFailed` or `AgentCompleted` follows from each that is alive."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendUnregister(Action):
    """Ask these agents to drop the registration; `AgentUnregistered` follows from each that has not begun."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportUnregistered(Action):
    """Report that no agent has the registration; its blocks may be used again at once."""


@dataclass(frozen=True, slots=True)
class ReportLoaded(Action):
    """Report the load as done: every byte is there. ``first_token``: P's, or the reason that there is none."""

    first_token: int | Missing = "not_promised"


@dataclass(frozen=True, slots=True)
class ReportFailed(Action):
    """Report the load as failed; its blocks may be used again at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReportAborted(Action):
    """Report the load of an aborted request as over; its blocks may be used again at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Park(Action):
    """Report the load as failed, but park its blocks: `Clear` follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Clear(Action):
    """The parked blocks may be used again."""


S = State

TRANSITIONS: Mapping[State, Mapping[type[Event], set[State]]] = {
    S.REGISTERING: {
        Registered: {S.WAITING}, RegistrationFailed: {S.CLOSED}, Aborted: {S.ABORTING, S.CLOSED},
        TimedOut: {S.PARKED, S.CLOSED}, GaveWay: {S.POSTPONED},
    },
    S.POSTPONED: {
        Registered: {S.UNREGISTERING}, RegistrationFailed: {S.CLOSED}, Aborted: {S.ABORTING, S.CLOSED},
        TimedOut: {S.PARKED, S.CLOSED},
    },
    S.WAITING: {
        AgentCompleted: {S.WAITING, S.LOADED, S.CLOSED}, AgentFailed: {S.WAITING, S.CANCELLING, S.CLOSED},
        AgentCancelled: {S.WAITING, S.CANCELLING, S.CLOSED}, AgentGone: {S.WAITING, S.CANCELLING, S.CLOSED},
        AgentSilent: {S.WAITING, S.CANCELLING}, Aborted: {S.ABORTING, S.CLOSED}, TimedOut: {S.CANCELLING, S.CLOSED},
        TokenPromised: {S.WAITING}, TokenArrived: {S.WAITING}, AgentUnregistered: {S.WAITING},
        PrefixWritten: {S.WAITING}, GaveWay: {S.UNREGISTERING, S.CLOSED},
    },
    S.UNREGISTERING: {
        AgentCompleted: {S.UNREGISTERING, S.LOADED, S.CLOSED}, AgentFailed: {S.UNREGISTERING, S.CANCELLING, S.CLOSED},
        AgentCancelled: {S.UNREGISTERING, S.CANCELLING, S.CLOSED}, AgentGone: {S.UNREGISTERING, S.CANCELLING, S.CLOSED},
        AgentSilent: {S.UNREGISTERING, S.CANCELLING}, Aborted: {S.ABORTING}, TimedOut: {S.CANCELLING},
        Tick: {S.UNREGISTERING}, TokenPromised: {S.UNREGISTERING}, TokenArrived: {S.UNREGISTERING},
        PrefixWritten: {S.UNREGISTERING},
        AgentUnregistered: {S.UNREGISTERING, S.CLOSED},
    },
    S.LOADED: {TokenArrived: {S.LOADED, S.CLOSED}, Tick: {S.LOADED, S.CLOSED}, Aborted: {S.CLOSED}},
    S.CANCELLING: {
        AgentCompleted: {S.CANCELLING, S.CLOSED}, AgentFailed: {S.CANCELLING, S.CLOSED},
        AgentCancelled: {S.CANCELLING, S.CLOSED}, AgentGone: {S.CANCELLING, S.CLOSED}, Aborted: {S.ABORTING},
        Tick: {S.CANCELLING, S.PARKED}, TokenPromised: {S.CANCELLING}, TokenArrived: {S.CANCELLING},
        PrefixWritten: {S.CANCELLING},
    },
    S.ABORTING: {
        Registered: {S.ABORTING}, RegistrationFailed: {S.CLOSED},
        AgentCompleted: {S.ABORTING, S.CLOSED}, AgentFailed: {S.ABORTING, S.CLOSED},
        AgentCancelled: {S.ABORTING, S.CLOSED}, AgentGone: {S.ABORTING, S.CLOSED}, Tick: {S.ABORTING},
        PrefixWritten: {S.ABORTING},
    },
    S.PARKED: {
        Registered: {S.PARKED}, RegistrationFailed: {S.CLOSED},
        AgentCompleted: {S.PARKED, S.CLOSED}, AgentFailed: {S.PARKED, S.CLOSED},
        AgentCancelled: {S.PARKED, S.CLOSED}, AgentGone: {S.PARKED, S.CLOSED}, Tick: {S.PARKED},
    },
    S.CLOSED: {},
}  # fmt: skip

_HAS_FAILED = {AgentSilent, TimedOut, AgentUnregistered, GaveWay}
_IS_REPORTED = {*_HAS_FAILED, Aborted, TokenPromised, TokenArrived}

IGNORED: Mapping[State, set[type[Event]]] = {
    S.POSTPONED: {GaveWay},
    S.WAITING: {Tick},
    S.UNREGISTERING: {GaveWay},
    S.LOADED: {*_HAS_FAILED, TokenPromised, PrefixWritten, AgentCompleted, AgentFailed, AgentCancelled, AgentGone},
    S.CANCELLING: _HAS_FAILED,
    S.ABORTING: _IS_REPORTED,
    S.PARKED: {*_IS_REPORTED, PrefixWritten},
}
