"""The protocol of one turn of a conversation in an engine's scheduler: D keeps the turn, or P's request brings it.

``TRANSITIONS`` lists every event that changes something in a state, and every state that it may lead to. ``IGNORED``
lists the events that a state accepts without effect: a client may give a request the id of a kept turn. ``turns`` runs
on these tables, and docs/design/protocol.md is drawn from the first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class State(enum.Enum):
    KEPT = "D has answered it, and holds its blocks for the next turn"
    LEAVING = "D ends it before its time: the engine steps until every rank has ended it"
    BROUGHT = "P's request brings it, and has no blocks yet"
    RETURNING = "P's request has registered its blocks for it"
    CLOSED = "nothing is left to do"


class Event:
    """Something that happened to a turn."""


@dataclass(frozen=True, slots=True)
class Released(Event):
    """D needs the blocks, or its prefix cache was reset."""


@dataclass(frozen=True, slots=True)
class RankEnded(Event):
    """This rank of D has returned the turn, or holds it no more: its time is over, or P has declined it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Placed(Event):
    """P's request has its blocks, and is to load ``tokens`` tokens; 0: it computes its prompt."""

    tokens: int


@dataclass(frozen=True, slots=True)
class LoadEnded(Event):
    """The load of P's request is over on every rank."""

    failed: bool


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """P's request has ended."""


class Action:
    """A task that a turn gives to the scheduler."""


@dataclass(frozen=True, slots=True)
class End(Action):
    """Have D's ranks end the turn; `RankEnded` follows from each."""


@dataclass(frozen=True, slots=True)
class Free(Action):
    """Give D's references to the blocks back."""


@dataclass(frozen=True, slots=True)
class Register(Action):
    """Register P's blocks with D for the prompt's first ``tokens`` tokens, which have this ``digest``. If these are too
    few to load, it is the digest of those that the prompt shares with the turn; empty: it shares none.
    """

    tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class SendDecline(Action):
    """Tell D that P does not load the turn. ``digest`` is that of tokens which the prompt shares with it."""

    digest: str


@dataclass(frozen=True, slots=True)
class Count(Action):
    """Count the prompt's first ``tokens`` tokens as computed before its first step: they are loaded."""

    tokens: int


S = State

TRANSITIONS: Mapping[State, Mapping[type[Event], set[State]]] = {
    S.KEPT: {Released: {S.LEAVING}, RankEnded: {S.KEPT, S.CLOSED}},
    S.LEAVING: {RankEnded: {S.LEAVING, S.CLOSED}},
    S.BROUGHT: {Placed: {S.RETURNING, S.CLOSED}, Finished: {S.CLOSED}},
    S.RETURNING: {LoadEnded: {S.CLOSED}, Finished: {S.CLOSED}},
    S.CLOSED: {},
}

IGNORED: Mapping[State, set[type[Event]]] = {
    S.KEPT: {Placed, LoadEnded, Finished},
    S.LEAVING: {Placed, LoadEnded, Finished},
}
