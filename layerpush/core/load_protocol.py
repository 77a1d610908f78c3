"""The protocol of one awaited push on one decode rank: its states, what can happen to it, what it asks for.

Every prefill rank that was sent the registration is an *agent* (its NIXL agent's name: one process, one incarnation).
An agent may write into the request's blocks until it has had its final word; the blocks are the engine's again
when every agent has.

``TRANSITIONS`` is the whole truth: every event that a state accepts and every state that it may lead to.
``session.py`` is the machine that walks it, ``docs/design`` draws it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class State(enum.Enum):
    REGISTERING = "no prefill engine knows of it yet"
    WAITING = "registered: prefill ranks may write"
    CANCELLING = "the blocks are wanted back, prefill ranks may still write"
    PARKED = "the engine was told that the load failed and holds the blocks aside: prefill ranks may still write"
    CLOSED = "nobody writes any more"


class Word(enum.Enum):
    """The last that an agent has to say about a request: after it, nothing of this agent is or will be on the wire."""

    LANDED = "it wrote everything"
    FAILED = "it gave up, and its WRITEs have ended"
    WITHDRAWN = "it was asked to stop, and its WRITEs have ended"
    GONE = "its process is known to be dead"


class Event:
    """What can happen to a session."""


@dataclass(frozen=True, slots=True)
class Registered(Event):
    """The registration is about to be sent to these agents."""

    agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class Unregistered(Event):
    """The registration could not be sent to anybody."""

    reason: str


@dataclass(frozen=True, slots=True)
class Spoke(Event):
    """This agent speaks layerpush."""

    agent: str


@dataclass(frozen=True, slots=True)
class Completed(Event):
    """All that this agent had to write has landed; ``needed`` agents must say so."""

    agent: str
    needed: int


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """This agent will not complete the push; ``drained``: and nothing of it is on the wire."""

    agent: str
    reason: str
    drained: bool


@dataclass(frozen=True, slots=True)
class Withdrawn(Event):
    """This agent answered a Cancel: nothing of it is or will be on the wire."""

    agent: str


@dataclass(frozen=True, slots=True)
class Gone(Event):
    """The agent's process is dead."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class Silent(Event):
    """Nothing has come from this agent for too long. It may be alive, and it may write."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped(Event):
    """The engine aborted the request. It holds the blocks until the load is reported as over."""

    reason: str


@dataclass(frozen=True, slots=True)
class Overdue(Event):
    """The registration's deadline has passed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""


class Action:
    """What a session asks its desk to do."""


@dataclass(frozen=True, slots=True)
class Cancel(Action):
    """Ask these agents to stop; `Withdrawn`, `Failed` or `Completed` follows from each that is alive."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Succeed(Action):
    """Report the load as done: every byte is there."""


@dataclass(frozen=True, slots=True)
class GiveUp(Action):
    """Report the load as failed; its blocks may be used again at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Park(Action):
    """Report the load as failed, but set its blocks aside: `Unpark` follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unpark(Action):
    """The blocks that were set aside may be used again."""


S = State
_OUT = {S.CANCELLING, S.CLOSED}

TRANSITIONS: Mapping[State, Mapping[type[Event], set[State]]] = {
    S.REGISTERING: {
        Registered: {S.WAITING}, Unregistered: {S.CLOSED}, Dropped: {S.CLOSED}, Overdue: {S.CLOSED},
        Spoke: {S.REGISTERING}, Completed: {S.REGISTERING}, Failed: {S.REGISTERING}, Withdrawn: {S.REGISTERING},
        Gone: {S.REGISTERING}, Silent: {S.REGISTERING}, Tick: {S.REGISTERING},
    },
    S.WAITING: {
        Spoke: {S.WAITING}, Tick: {S.WAITING},
        Completed: {S.WAITING, S.CLOSED}, Failed: {S.WAITING} | _OUT, Withdrawn: {S.WAITING} | _OUT,
        Gone: {S.WAITING} | _OUT, Silent: {S.WAITING, S.CANCELLING}, Dropped: {S.CANCELLING}, Overdue: {S.CANCELLING},
    },
    S.CANCELLING: {
        Spoke: {S.CANCELLING}, Tick: {S.CANCELLING, S.PARKED},
        Completed: _OUT, Failed: _OUT, Withdrawn: _OUT, Gone: _OUT,
        Silent: {S.CANCELLING}, Dropped: {S.CANCELLING}, Overdue: {S.CANCELLING},
    },
    S.PARKED: {
        Spoke: {S.PARKED}, Tick: {S.PARKED},
        Completed: {S.PARKED, S.CLOSED}, Failed: {S.PARKED, S.CLOSED}, Withdrawn: {S.PARKED, S.CLOSED},
        Gone: {S.PARKED, S.CLOSED}, Silent: {S.PARKED}, Dropped: {S.PARKED}, Overdue: {S.PARKED},
    },
    S.CLOSED: {},
}  # fmt: skip
