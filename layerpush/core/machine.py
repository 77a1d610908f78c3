"""A state machine with a table of the events that each state accepts, and of the states that they may lead to.

``push_session`` on P and ``load_session`` on D are such machines. A machine has no I/O, no clock, no threads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

StateT = TypeVar("StateT", bound=enum.Enum)
EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")


class IllegalTransitionError(AssertionError):
    """An event that the protocol does not allow in this state."""


class Machine(Generic[StateT, EventT, ActionT]):
    """``TRANSITIONS`` has, for each state, the types of events that change something, and the states that each may lead
    to. ``IGNORED`` has the types that a state accepts and that change nothing. ``HANDLERS`` has a method for each type
    of event. It takes the event and a list to which it adds actions. It returns the next state. ``now`` is the time of
    the last event.
    """

    TRANSITIONS: ClassVar[Mapping[Any, Mapping[type, set[Any]]]]
    IGNORED: ClassVar[Mapping[Any, set[type]]]
    HANDLERS: ClassVar[Mapping[type, Callable[..., Any]]]

    def __init__(self, request_id: str, state: StateT) -> None:
        self.request_id = request_id
        self.state = state
        self.now = 0.0

    def handle(self, event: EventT, now: float) -> list[ActionT]:
        """Apply one event, at ``now`` in seconds of the caller's clock. Raises ``IllegalTransitionError``, or an
        exception of the event's handler; both leave the state as it was.
        """
        kind = type(event)
        allowed = self.TRANSITIONS[self.state].get(kind)
        if allowed is None:
            if self.accepts(kind):
                return []
            raise IllegalTransitionError(f"{self.request_id}: {kind.__name__} while {self.state.name}")
        self.now = now
        actions: list[ActionT] = []
        state = self.HANDLERS[kind](self, event, actions)
        if state not in allowed:
            raise IllegalTransitionError(
                f"{self.request_id}: {kind.__name__} led from {self.state.name} to {state.name}"
            )
        self.state = state
        return actions

    def accepts(self, event: type[EventT]) -> bool:
        """Whether the current state accepts events of this type, if only to ignore them."""
        return event in self.TRANSITIONS[self.state] or event in self.IGNORED.get(self.state, ())
