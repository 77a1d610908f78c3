"""One load on one decode rank as a state machine: ``(state, event, now) -> state, actions``. No I/O, no clock.

A session follows one request from its registration until no prefill rank can write into its blocks. The tables
in ``load_protocol`` have the events that each state accepts and the states that they may lead to. Any other event or
next state raises ``IllegalTransitionError``.

    REGISTERING   this rank of D connects and sends the registration; P may know it from another rank
    POSTPONED     the engine needs the blocks; the rank connects on, because P may have begun, and then asks P
    WAITING       agents may write; the load is wanted
    UNREGISTERING the engine needs the blocks; agents are asked to drop the registration, and go on if they have begun
    LOADED        every byte is there; an agent has promised P's first token, which may come for ``TOKEN_WAIT_S`` longer
    CANCELLING    the load has failed; agents are asked to stop; after ``cancel_timeout_s`` the load is parked
    ABORTING      the engine aborted the request and keeps its blocks; agents are asked to stop, for as long as it takes
    PARKED        the load was reported as failed; the blocks are parked until no agent may write
    CLOSED        no agent may write

Another rank of the engine may have registered, and P writes to all ranks then. So a rank that still connects goes on
when its request is aborted or overdue, and asks the agents to stop.

The load that owns the session (``decode.load.Load``) calls ``handle`` on the writer thread and performs the actions.
Other objects may read the fields; only the session writes them.

The invariants, each with the method that keeps it:

- the blocks are given back only when every agent has its final status, or enough agents have landed (``_is_over``);
- the first final status of an agent stands: a duplicate, or a later one, changes nothing (``_settle``);
- the load is reported once: ``ReportLoaded``, ``ReportFailed``, ``ReportAborted``, or ``Park`` and later ``Clear``;
- the first token that arrives stands, and nothing that happens to it changes whether the load succeeds
  (``_on_token_arrived``);
- a prefix counts as landed only when every agent has written its part, and has promised not to write there again
  (``landed_tokens``);
- a load in which something wrong has landed does not succeed, and nothing of it is kept (``_complete``,
  ``landed_tokens``);
- an agent that does not answer is asked again, at growing intervals (``_on_tick``).
"""

from __future__ import annotations

from typing import ClassVar

from layerpush.core.first_token import Missing
from layerpush.core.machine import IllegalTransitionError, Machine
from layerpush.decode import load_protocol
from layerpush.decode.load_protocol import (
    IGNORED,
    TRANSITIONS,
    Action,
    Clear,
    Event,
    FinalStatus,
    Park,
    ReportAborted,
    ReportFailed,
    ReportLoaded,
    ReportUnregistered,
    SendCancel,
    SendUnregister,
    State,
)

S = State

RETRY_S = 1.0
"""Seconds from the first ``Cancel`` to the second. They double with each one, up to ``cancel_timeout_s``."""
TOKEN_WAIT_S = 50e-3
"""Seconds for which a complete load waits for a promised first token. A slow D needs about as long to compute it, so a
wait in vain at most doubles that time.
"""


class LoadSession(Machine[State, Event, Action]):
    """See the module's text.

    ``cancel_timeout_s``: seconds for which the engine's request waits for agents that do not answer a ``Cancel``.
    ``ranks``: this engine's. P writes to all of them once one has registered.
    """

    TRANSITIONS: ClassVar = TRANSITIONS
    IGNORED: ClassVar = IGNORED

    def __init__(self, request_id: str, cancel_timeout_s: float, ranks: int = 1) -> None:
        super().__init__(request_id, State.REGISTERING)
        self.agents: frozenset[str] = frozenset()
        self.statuses: dict[str, FinalStatus] = {}
        self.cause: str | None = None
        self.is_void = False
        """Whether something that has landed is wrong, or P doubts it: the load fails, and nothing of it is kept."""
        self.first_token: int | Missing = "not_promised"
        self._cancel_timeout_s = cancel_timeout_s
        self._ranks = ranks
        self._retry_s = RETRY_S
        self._needed = 1
        self._asked_at = 0.0
        self._park_at = 0.0
        self._token_until = 0.0
        self._prefixes: dict[str, int] = {}

    @property
    def landed_tokens(self) -> int:
        """The prompt's first tokens that stay right in the request's blocks, even if the load fails."""
        if self.is_void:
            return 0
        unfinished = [agent for agent in self.agents if self.statuses.get(agent) is not FinalStatus.LANDED]
        return min((self._prefixes.get(agent, 0) for agent in unfinished), default=0)

    @property
    def is_unsent(self) -> bool:
        """Whether this rank may still send the registration, and has sent it to no agent."""
        return not self.agents and self.state is not S.CLOSED

    @property
    def open_agents(self) -> frozenset[str]:
        """The agents that may write into the request's blocks now or later."""
        return self.agents - self.statuses.keys()

    @property
    def _may_be_written(self) -> bool:
        """Whether an agent may write into the request's blocks, perhaps one that only another rank has reached."""
        return bool(self.open_agents) or (not self.agents and self._ranks > 1)

    @property
    def landed(self) -> int:
        """The number of agents that have written everything."""
        return sum(status is FinalStatus.LANDED for status in self.statuses.values())

    def next_due(self, now: float) -> float | None:
        """The time of the next ``Tick`` that changes something, unless an event comes first: ``now`` if it is due, None
        if there is none.
        """
        if self.state is S.LOADED:
            return max(now, self._token_until)
        if not self.agents or self.state not in (S.UNREGISTERING, S.CANCELLING, S.ABORTING, S.PARKED):
            return None
        due = self._asked_at + self._retry_s
        return max(now, min(due, self._park_at) if self.state is S.CANCELLING else due)

    @property
    def _complete(self) -> bool:
        return self.landed >= self._needed and not self.is_void

    @property
    def _is_over(self) -> bool:
        return self._complete or not self.open_agents

    def _on_registered(self, event: load_protocol.Registered, actions: list[Action]) -> State:
        if not event.agents or self.agents:
            raise IllegalTransitionError(f"{self.request_id}: registered with nobody, or again")
        self.agents = event.agents
        if self.state is S.REGISTERING:
            return S.WAITING
        state = S.UNREGISTERING if self.state is S.POSTPONED else self.state
        self._ask(actions, state)
        return state

    def _on_completed(self, event: load_protocol.AgentCompleted, actions: list[Action]) -> State:
        if event.agent in self.open_agents:
            self._needed = max(self._needed, event.needed)
        return self._settle(event.agent, FinalStatus.LANDED, None, actions)

    def _on_token_promised(self, event: load_protocol.TokenPromised, _: list[Action]) -> State:
        if event.agent in self.agents and self.first_token == "not_promised":
            self.first_token = "late"
        return self.state

    def _on_token_arrived(self, event: load_protocol.TokenArrived, actions: list[Action]) -> State:
        if event.agent not in self.agents:
            return self.state
        if not isinstance(self.first_token, int):
            self.first_token = "other_sampling" if event.token is None else event.token
        return self._close(None, actions) if self.state is S.LOADED else self.state

    def _on_prefix_written(self, event: load_protocol.PrefixWritten, _: list[Action]) -> State:
        if event.agent in self.open_agents:
            self._prefixes[event.agent] = max(event.tokens, self._prefixes.get(event.agent, 0))
        return self.state

    def _on_failed(self, event: load_protocol.AgentFailed, actions: list[Action]) -> State:
        if event.void and event.agent in self.open_agents:
            self.is_void, self.cause = True, event.reason
        if event.drained:
            return self._settle(event.agent, FinalStatus.FAILED, event.reason, actions)
        return self._fail(event.reason, actions) if event.agent in self.open_agents else self.state

    def _on_cancelled(self, event: load_protocol.AgentCancelled, actions: list[Action]) -> State:
        cause = f"agent {event.agent} cancelled the push"
        return self._settle(event.agent, FinalStatus.CANCELLED, cause, actions)

    def _on_gave_way(self, _: load_protocol.GaveWay, actions: list[Action]) -> State:
        if self.state is S.REGISTERING:
            return S.POSTPONED
        if not self.open_agents:
            return self._unregistered(actions)
        self._ask(actions, S.UNREGISTERING)
        return S.UNREGISTERING

    def _on_unregistered(self, event: load_protocol.AgentUnregistered, actions: list[Action]) -> State:
        if event.agent not in self.open_agents:
            return self.state
        self.statuses[event.agent] = FinalStatus.UNREGISTERED  # in WAITING another rank of this engine was faster
        return self.state if self.state is S.WAITING or self.open_agents else self._unregistered(actions)

    def _unregistered(self, actions: list[Action]) -> State:
        if set(self.statuses.values()) != {FinalStatus.UNREGISTERED}:
            return self._close(None, actions)
        self.cause = "the prefill engine had not begun the prompt, and other requests needed the blocks"
        actions.append(ReportUnregistered())
        return S.CLOSED

    def _on_gone(self, event: load_protocol.AgentGone, actions: list[Action]) -> State:
        return self._settle(event.agent, FinalStatus.GONE, event.reason, actions)

    def _on_silent(self, event: load_protocol.AgentSilent, actions: list[Action]) -> State:
        return self._fail(event.reason, actions) if event.agent in self.open_agents else self.state

    def _on_aborted(self, event: load_protocol.Aborted, actions: list[Action]) -> State:
        if self.state is S.LOADED or not self._may_be_written:
            self.cause = event.reason
            actions.append(ReportAborted(event.reason))
            return S.CLOSED
        if self.agents:
            self._fail(event.reason, actions)
        self.cause = self.cause or event.reason
        return S.ABORTING

    def _on_registration_failed(self, event: load_protocol.RegistrationFailed, actions: list[Action]) -> State:
        return self._close(event.reason, actions)

    def _on_timed_out(self, event: load_protocol.TimedOut, actions: list[Action]) -> State:
        return self._fail(event.reason, actions)

    def _on_tick(self, _: load_protocol.Tick, actions: list[Action]) -> State:
        if self.state is S.LOADED:
            return self._close(None, actions) if self.now >= self._token_until else self.state
        if self.agents and self.now >= self._asked_at + self._retry_s:
            self._retry_s = max(self._retry_s, min(2 * self._retry_s, self._cancel_timeout_s))
            self._ask(actions, self.state)
        if self.state is S.CANCELLING and self.now >= self._park_at:
            actions.append(Park(self.cause or ""))
            return S.PARKED
        return self.state

    def _settle(self, agent: str, status: FinalStatus, cause: str | None, actions: list[Action]) -> State:
        """Note an agent's final status; ``cause`` is the reason of a failure, or None."""
        if agent not in self.open_agents:
            return self.state
        self.statuses[agent] = status
        if self.state in (S.WAITING, S.UNREGISTERING) and self._complete and self.first_token == "late":
            self._token_until = self.now + TOKEN_WAIT_S
            return S.LOADED
        if self._is_over:
            return self._close(cause, actions)
        return self.state if cause is None else self._fail(cause, actions)

    def _fail(self, cause: str, actions: list[Action]) -> State:
        """The load cannot succeed any more. The agents that may write are asked to stop, unless they were asked."""
        self.cause = self.cause or cause
        if not self._may_be_written:
            return self._close(cause, actions)
        if self.state in (S.REGISTERING, S.POSTPONED):
            actions.append(Park(self.cause))
            return S.PARKED
        if self.state not in (S.WAITING, S.UNREGISTERING):
            return self.state
        self._park_at = self.now + self._cancel_timeout_s
        self._ask(actions, S.CANCELLING)
        return S.CANCELLING

    def _close(self, cause: str | None, actions: list[Action]) -> State:
        self.cause = self.cause or cause
        if self.state is S.PARKED:
            actions.append(Clear())
        elif self.state is S.ABORTING:
            actions.append(ReportAborted(self.cause or ""))
        elif self._complete:
            actions.append(ReportLoaded(self.first_token))
        else:
            self.cause = self.cause or f"only {self.landed} of {self._needed} prefill ranks wrote their part"
            actions.append(ReportFailed(self.cause))
        return S.CLOSED

    def _ask(self, actions: list[Action], state: State) -> None:
        self._asked_at = self.now
        agents = tuple(sorted(self.open_agents))
        actions.append(SendUnregister(agents) if state is S.UNREGISTERING else SendCancel(agents))

    HANDLERS: ClassVar = {
        load_protocol.Registered: _on_registered,
        load_protocol.RegistrationFailed: _on_registration_failed,
        load_protocol.AgentCompleted: _on_completed,
        load_protocol.TokenPromised: _on_token_promised,
        load_protocol.TokenArrived: _on_token_arrived,
        load_protocol.PrefixWritten: _on_prefix_written,
        load_protocol.AgentFailed: _on_failed,
        load_protocol.AgentCancelled: _on_cancelled,
        load_protocol.GaveWay: _on_gave_way,
        load_protocol.AgentUnregistered: _on_unregistered,
        load_protocol.AgentGone: _on_gone,
        load_protocol.AgentSilent: _on_silent,
        load_protocol.Aborted: _on_aborted,
        load_protocol.TimedOut: _on_timed_out,
        load_protocol.Tick: _on_tick,
    }
