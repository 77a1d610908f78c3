"""One awaited push on one decode rank as a state machine: ``(state, event, now) -> state, actions``. No I/O, no clock.

A session follows one request from its registration until no prefill rank can write into its blocks any more, and says
how that ended. What may happen when is the table in ``protocol.py``; anything else raises ``IllegalTransitionError``.

The invariants, each enforced where it matters:

- the blocks are given back only when every agent has had its final word, or enough agents have landed (``_is_over``);
- the first word of an agent stands: a duplicate, or a late one, changes nothing (``_take``);
- the load is reported exactly once: ``Succeed``, ``GiveUp``, or ``Park`` and later ``Unpark``;
- as long as an agent has not answered, it is asked again, less and less often (``_on_tick``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerpush.core import load_protocol
from layerpush.core.load_protocol import (
    TRANSITIONS,
    Action,
    Cancel,
    Event,
    GiveUp,
    Park,
    State,
    Succeed,
    Unpark,
    Word,
)
from layerpush.core.machine import IllegalTransitionError

S = State

RETRY_S = 1.0


class DecodeSession:
    """See the module's text.

    ``patience_s`` is how long the engine's request waits for agents that do not answer a ``Cancel``, ``retry_s`` how
    long the first ``Cancel`` is given; each further one is given twice as long, up to ``patience_s``.
    """

    def __init__(self, request_id: str, patience_s: float, retry_s: float = RETRY_S) -> None:
        self.request_id = request_id
        self.state = State.REGISTERING
        self.agents: frozenset[str] = frozenset()
        self.words: dict[str, Word] = {}
        self.cause: str | None = None
        self.dropped = False
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._spoken: set[str] = set()
        self._needed = 1
        self._asked_at = 0.0
        self._patient_until = 0.0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event. Raises ``IllegalTransitionError``."""
        allowed = TRANSITIONS[self.state].get(type(event))
        if allowed is None:
            raise IllegalTransitionError(f"{self.request_id}: {type(event).__name__} while {self.state.name}")
        actions: list[Action] = []
        state = _HANDLERS[type(event)](self, event, now, actions)
        if state not in allowed:
            raise IllegalTransitionError(
                f"{self.request_id}: {type(event).__name__} led from {self.state.name} to {state.name}"
            )
        self.state = state
        return actions

    def accepts(self, event: type[Event]) -> bool:
        return event in TRANSITIONS[self.state]

    @property
    def open_agents(self) -> frozenset[str]:
        """Who may write into the request's blocks now or later."""
        return self.agents - self.words.keys()

    @property
    def landed(self) -> int:
        """How many agents have written everything."""
        return sum(word is Word.LANDED for word in self.words.values())

    def next_due(self, now: float) -> float | None:
        """When a ``Tick`` will change something if nothing happens until then; ``now`` if it would already."""
        if self.state not in (S.CANCELLING, S.PARKED):
            return None
        due = [self._asked_at + self._retry_s]
        if self.state is S.CANCELLING and not self.dropped:
            due.append(self._patient_until)
        return max(now, min(due)) if due else None

    def speaks(self, agent: str) -> bool:
        """Whether this agent is known to speak layerpush. One that is not may be asked to stop all the same."""
        return agent in self._spoken

    @property
    def _complete(self) -> bool:
        return self.landed >= self._needed

    @property
    def _is_over(self) -> bool:
        return self._complete or not self.open_agents

    def _on_registered(self, event: load_protocol.Registered, _: float, __: list[Action]) -> State:
        if not event.agents:
            raise IllegalTransitionError(f"{self.request_id}: registered with nobody")
        self.agents = event.agents
        return S.WAITING

    def _on_spoke(self, event: load_protocol.Spoke, _: float, __: list[Action]) -> State:
        if event.agent in self.agents:
            self._spoken.add(event.agent)
        return self.state

    def _on_completed(self, event: load_protocol.Completed, now: float, actions: list[Action]) -> State:
        if event.agent not in self.open_agents:
            return self.state
        self._needed = max(self._needed, event.needed)
        return self._take(event.agent, Word.LANDED, None, now, actions)

    def _on_failed(self, event: load_protocol.Failed, now: float, actions: list[Action]) -> State:
        if event.agent not in self.open_agents:
            return self.state
        if event.drained:
            return self._take(event.agent, Word.FAILED, event.reason, now, actions)
        self._spoken.add(event.agent)
        return self._leave(event.reason, now, actions)

    def _on_withdrawn(self, event: load_protocol.Withdrawn, now: float, actions: list[Action]) -> State:
        return self._take(event.agent, Word.WITHDRAWN, f"agent {event.agent} withdrew the push", now, actions)

    def _on_gone(self, event: load_protocol.Gone, now: float, actions: list[Action]) -> State:
        return self._take(event.agent, Word.GONE, event.reason, now, actions)

    def _on_silent(self, event: load_protocol.Silent, now: float, actions: list[Action]) -> State:
        return self._leave(event.reason, now, actions) if event.agent in self.open_agents else self.state

    def _on_dropped(self, event: load_protocol.Dropped, now: float, actions: list[Action]) -> State:
        self.dropped = self.dropped or self.state is not S.PARKED
        return self._leave(event.reason, now, actions)

    def _on_ended(
        self, event: load_protocol.Unregistered | load_protocol.Overdue, now: float, actions: list[Action]
    ) -> State:
        return self._leave(event.reason, now, actions)

    def _on_tick(self, _: load_protocol.Tick, now: float, actions: list[Action]) -> State:
        if self.state not in (S.CANCELLING, S.PARKED):
            return self.state
        if now >= self._asked_at + self._retry_s:
            self._retry_s = max(self._retry_s, min(2 * self._retry_s, self._patience_s))
            self._ask(now, actions)
        if self.state is S.CANCELLING and not self.dropped and now >= self._patient_until:
            actions.append(Park(self.cause or ""))
            return S.PARKED
        return self.state

    def _take(self, agent: str, word: Word, cause: str | None, now: float, actions: list[Action]) -> State:
        """An agent's final word."""
        if agent not in self.open_agents:
            return self.state
        self.words[agent] = word
        if self._is_over:
            return self._close(cause, actions)
        return self.state if cause is None else self._leave(cause, now, actions)

    def _leave(self, cause: str, now: float, actions: list[Action]) -> State:
        """The push will not complete, or nobody wants it any more."""
        self.cause = self.cause or cause
        if self.state is S.REGISTERING:
            return self._close(cause, actions)
        if self.state is not S.WAITING:
            return self.state
        self._patient_until = now + self._patience_s
        self._ask(now, actions)
        return S.CANCELLING

    def _close(self, cause: str | None, actions: list[Action]) -> State:
        self.cause = self.cause or cause
        if self.state is S.PARKED:
            actions.append(Unpark())
        elif self._complete and not self.dropped:
            actions.append(Succeed())
        else:
            self.cause = self.cause or f"only {self.landed} of {self._needed} prefill ranks wrote their part"
            actions.append(GiveUp(self.cause))
        return S.CLOSED

    def _ask(self, now: float, actions: list[Action]) -> None:
        self._asked_at = now
        actions.append(Cancel(tuple(sorted(self.open_agents))))


_HANDLERS: Mapping[type[Event], Callable[[Any, Any, float, list[Action]], State]] = {
    load_protocol.Registered: DecodeSession._on_registered,
    load_protocol.Unregistered: DecodeSession._on_ended,
    load_protocol.Spoke: DecodeSession._on_spoke,
    load_protocol.Completed: DecodeSession._on_completed,
    load_protocol.Failed: DecodeSession._on_failed,
    load_protocol.Withdrawn: DecodeSession._on_withdrawn,
    load_protocol.Gone: DecodeSession._on_gone,
    load_protocol.Silent: DecodeSession._on_silent,
    load_protocol.Dropped: DecodeSession._on_dropped,
    load_protocol.Overdue: DecodeSession._on_ended,
    load_protocol.Tick: DecodeSession._on_tick,
}
