"""A state machine with a table of the events that each state accepts, and of the states that they may lead to.

``push_session`` on P and ``load_session`` on D are such machines. A machine has no I/O, no clock, no threads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event")
Action = TypeVar("Action")


class IllegalTransitionError(AssertionError):
    """An event that the protocol does not allow in this state."""


class Machine(Generic[State, Event, Action]):
    """``TRANSITIONS`` has, for each state, the types of events that it accepts, and the states that each may lead to.
    ``HANDLERS`` has a method for each type of event. It takes the event, the other arguments of ``handle``, and a list
    to which it adds actions. It returns the next state.
    """

    TRANSITIONS: ClassVar[Mapping[Any, Mapping[type, set[Any]]]]
    HANDLERS: ClassVar[Mapping[type, Callable[..., Any]]]

    def __init__(self, request_id: str, state: State) -> None:
        self.request_id = request_id
        self.state = state

    def handle(self, event: Event, *when: float) -> list[Action]:
        """Apply one event, ``when`` in seconds where the machine has deadlines. Raises ``IllegalTransitionError``, or
        an exception of the event's handler; both leave the state as it was.
        """
        allowed = self.TRANSITIONS[self.state].get(type(event))
        if allowed is None:
            raise IllegalTransitionError(f"{self.request_id}: {type(event).__name__} while {self.state.name}")
        actions: list[Action] = []
        state = self.HANDLERS[type(event)](self, event, *when, actions)
        if state not in allowed:
            raise IllegalTransitionError(
                f"{self.request_id}: {type(event).__name__} led from {self.state.name} to {state.name}"
            )
        self.state = state
        return actions

    def accepts(self, event: type[Event]) -> bool:
        """Whether the current state accepts events of this type."""
        return event in self.TRANSITIONS[self.state]
