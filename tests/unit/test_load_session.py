"""One load on a decode rank: its deadlines, then every event in every situation of a load with two agents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from layerpush.core.machine import IllegalTransitionError
from layerpush.decode import load_session
from layerpush.decode.load_protocol import (
    IGNORED,
    TRANSITIONS,
    Aborted,
    Action,
    AgentCancelled,
    AgentCompleted,
    AgentFailed,
    AgentGone,
    AgentSilent,
    AgentUnregistered,
    Clear,
    Event,
    GaveWay,
    Park,
    PrefixWritten,
    Registered,
    RegistrationFailed,
    ReportAborted,
    ReportFailed,
    ReportLoaded,
    ReportUnregistered,
    SendCancel,
    SendUnregister,
    State,
    Tick,
    TimedOut,
    TokenArrived,
    TokenPromised,
)
from layerpush.decode.load_session import LoadSession
from tests.unit.clones import clone

PATIENCE_S, TOKEN_WAIT_S = 5.0, 5.0
AGENTS = frozenset({"A", "B"})
STEP_S, STEPS = 4.0, 2
"""Time passes in steps of this length: enough to lose patience, and one more."""


@pytest.fixture(autouse=True)
def _wait_for_a_token_beyond_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_session, "TOKEN_WAIT_S", TOKEN_WAIT_S)


def test_a_registration_needs_an_agent() -> None:
    with pytest.raises(IllegalTransitionError, match="d-1: registered with nobody, or again"):
        LoadSession("d-1", PATIENCE_S).handle(Registered(frozenset()), 0.0)


@pytest.mark.parametrize("end", [Aborted("why"), TimedOut("why")], ids=repr)
@pytest.mark.parametrize(
    ("cancel_timeout_s", "pauses"),
    [(5.0, [1, 2, 4, 5, 5]), (20.0, [1, 2, 4, 8, 16, 20, 20]), (0.5, [1, 1, 1])],
)
def test_cancels_are_repeated_forever_at_growing_intervals(
    end: Event, cancel_timeout_s: float, pauses: list[int]
) -> None:
    """A stopped prefill engine keeps each cancel in its queue."""
    session = LoadSession("d-1", cancel_timeout_s)
    session.handle(Registered(frozenset("A")), 0.0)
    session.handle(end, 0.0)
    now, asked = 0.0, [0.0]
    while len(asked) <= len(pauses):
        due = session.next_due(now)
        assert due is not None
        now = due
        actions = session.handle(Tick(), now)
        asked += [now] * sum(isinstance(action, SendCancel) for action in actions)
    assert [after - before for before, after in itertools.pairwise(asked)] == pauses


@dataclass
class AccountedLoad:
    """A load, and an account of it that is kept from its events alone."""

    session: LoadSession
    steps: int = 0
    """Number of steps that have passed."""
    writers: set[str] = field(default_factory=set)
    """Agents that may write: they got the registration and have not sent a final message."""
    agents: set[str] = field(default_factory=set)
    promised: bool = False
    token: int | None = None
    refused: bool = False
    landed: set[str] = field(default_factory=set)
    prefixes: dict[str, int] = field(default_factory=dict)
    unregistered: set[str] = field(default_factory=set)
    gave_way: bool = False
    needed: int = 1
    cause: str | None = None
    """The reason of the failure; the first one stands."""
    failed_at: float | None = None
    aborted: bool = False
    asked: set[str] = field(default_factory=set)
    reports: list[type[Action]] = field(default_factory=list)

    @property
    def now(self) -> float:
        return self.steps * STEP_S

    def send(self, event: Event) -> None:
        self.steps += isinstance(event, Tick)
        before = clone(vars(self.session)) | {"now": self.now}
        known = self.agents if isinstance(event, TokenPromised | TokenArrived) else self.writers
        is_known = getattr(event, "agent", "A") in known or not hasattr(event, "agent")
        if is_known and type(event) not in IGNORED.get(self.session.state, ()):
            self._note(event)
        for action in self.session.handle(event, self.now):
            assert is_known
            self._check(action)
        assert is_known or vars(self.session) | {"now": self.now} == before, (
            "an agent that may not write changed the session"
        )
        self._check_state()
        self._check_clock()

    def _note(self, event: Event) -> None:
        match event:
            case Registered(agents):
                self.writers, self.agents = set(agents), set(agents)
            case TokenPromised():
                self.promised = True
            case TokenArrived(_, token):
                self.token = token if self.token is None else self.token
                self.refused |= token is None
            case PrefixWritten(agent, tokens):
                self.prefixes[agent] = tokens
            case AgentCompleted(agent, needed):
                self.writers.remove(agent)
                self.landed.add(agent)
                self.needed = max(self.needed, needed)
            case AgentFailed(agent, _, drained=True) | AgentCancelled(agent) | AgentGone(agent, _):
                self.writers.remove(agent)
            case AgentUnregistered(agent):
                self.writers.remove(agent)
                self.unregistered.add(agent)
            case GaveWay():
                self.gave_way = True
            case Aborted():
                self.aborted = True
        if isinstance(event, AgentCancelled):
            self.cause = self.cause or f"agent {event.agent} cancelled the push"
        self.cause = self.cause or getattr(event, "reason", None)
        if self.cause and self.failed_at is None:
            self.failed_at = self.now

    @property
    def is_complete(self) -> bool:
        return len(self.landed) >= self.needed

    def _check(self, action: Action) -> None:
        match action:
            case SendCancel(agents):
                assert set(agents) == self.writers
                self.asked = set(agents)
                return
            case SendUnregister(agents):
                assert set(agents) == self.writers
                assert self.gave_way
                return
            case ReportUnregistered():
                assert self.gave_way
                assert self.unregistered == self.agents, "an agent may have begun"
            case Park(reason):
                assert not self.aborted, "the engine itself holds the blocks of an aborted request"
                assert self.failed_at is not None
                assert self.now >= self.failed_at + PATIENCE_S or not self.agents
                assert reason == self.cause
            case ReportLoaded(first_token):
                assert self.is_complete
                assert not self.aborted
                missing = "other_sampling" if self.refused else "late" if self.promised else "not_promised"
                assert first_token == (missing if self.token is None else self.token)
            case ReportFailed(reason):
                assert not self.is_complete
                assert not self.aborted
                too_few = f"only {len(self.landed)} of {self.needed} prefill ranks wrote their part"
                assert reason == self.session.cause == (self.cause or too_few)
            case ReportAborted(reason):
                assert self.aborted
                assert reason == self.cause
        assert isinstance(action, Park) or self.is_complete or not self.writers, f"{action} while {self.writers} write"
        self.reports.append(type(action))

    def _check_state(self) -> None:
        session = self.session
        assert session.open_agents == self.writers
        assert session.landed == len(self.landed)
        parts = [self.prefixes.get(agent, 0) for agent in self.agents - self.landed]
        assert session.landed_tokens == min(parts, default=0), "a part of the prefix may be missing"
        assert self.reports in (
            [],
            [ReportLoaded],
            [ReportFailed],
            [ReportAborted],
            [ReportUnregistered],
            [Park],
            [Park, Clear],
        )
        assert (session.state is State.PARKED) == (self.reports == [Park])
        assert (session.state is State.CLOSED) == (self.reports not in ([], [Park]))
        assert self.cause in (None, session.cause)
        assert (session.state is State.POSTPONED) == (
            self.gave_way and not self.agents and not self.reports and not self.aborted
        )
        if session.agents:
            awaits_word = session.state is State.WAITING and bool(self.unregistered)
            is_over = self.is_complete or not (self.writers or awaits_word)
            assert (session.state in (State.CLOSED, State.LOADED)) == is_over
            is_wanted = not is_over and self.cause is None
            assert (session.state is State.WAITING) == (is_wanted and not self.gave_way)
            assert (session.state is State.UNREGISTERING) == (is_wanted and self.gave_way)
            assert session.state is not State.LOADED or (self.is_complete and self.promised and self.token is None)
            assert session.state is not State.LOADED or not self.refused
        if session.state in (State.CANCELLING, State.ABORTING, State.PARKED):
            assert self.writers <= self.asked, "an agent may write and was not asked to stop"

    def _check_clock(self) -> None:
        """A tick acts at its due time, and not just before."""
        due = self.session.next_due(self.now)
        waits = self.session.is_unsent or self.session.state is State.WAITING
        assert (due is not None) == (not waits and self.session.state is not State.CLOSED)
        if due is None:
            return
        assert due >= self.now
        assert clone(self.session).handle(Tick(), due)
        if due > self.now:
            assert clone(self.session).handle(Tick(), due - 0.01) == []

    @property
    def likeness(self) -> str:
        """Equal for loads with the same future; the reason of a failure does not count."""
        fields = {name: value for name, value in vars(self.session).items() if name != "cause"}
        ordered = {
            name: sorted(value) if isinstance(value, frozenset | dict) else value for name, value in fields.items()
        }
        return f"{ordered} {sorted(map(str, self.session.statuses.items()))} {self.steps} {sorted(self.asked)}"


EVENTS: list[Event] = [
    Registered(AGENTS), RegistrationFailed("unsent"), Aborted("dropped"), TimedOut("overdue"), Tick(), GaveWay(),
    *(event
      for agent in (*sorted(AGENTS), "a stranger")
      for event in (AgentCompleted(agent, 1), AgentCompleted(agent, 2), AgentFailed(agent, "failed", drained=True),
                    AgentFailed(agent, "failing", drained=False), AgentCancelled(agent), AgentGone(agent, "gone"),
                    AgentSilent(agent, "silent"), AgentUnregistered(agent))),
    *(event
      for agent in ("A", "a stranger")
      for event in (TokenPromised(agent), TokenArrived(agent, 7), TokenArrived(agent, None))),
    *(PrefixWritten(agent, 4) for agent in ("A", "a stranger")),
]  # fmt: skip


def explored(ranks: int) -> Iterator[tuple[State, type[Event], State]]:
    """Every event in every situation of a load with two agents, on a D of so many ranks, and the state after it."""
    fresh = [AccountedLoad(LoadSession("d-1", PATIENCE_S, ranks))]
    seen = {fresh[0].likeness}
    while fresh:
        load = fresh.pop()
        same = clone(load.session)
        for event in EVENTS:
            if isinstance(event, Registered | RegistrationFailed) and load.agents:
                continue  # it comes once
            if not load.session.accepts(type(event)):
                with pytest.raises(IllegalTransitionError, match=f"{type(event).__name__} while {same.state.name}"):
                    same.handle(event, load.now)
                assert vars(same) == vars(load.session)
                continue
            after = clone(load)
            after.send(event)
            yield load.session.state, type(event), after.session.state
            if isinstance(event, PrefixWritten):
                continue  # no other event depends on it
            if after.likeness not in seen and after.steps <= STEPS:
                seen.add(after.likeness)
                fresh.append(after)


def test_every_event_in_every_state_follows_the_transition_table() -> None:
    """The account agrees, each row of the table is used, and no transition is outside of the table."""
    table = {(state, event, to) for state, row in TRANSITIONS.items() for event, tos in row.items() for to in tos}
    ignored = {(state, event, state) for state, events in IGNORED.items() for event in events}
    assert not table & ignored
    assert {*explored(1), *explored(2)} == table | ignored


@pytest.mark.parametrize(
    "events",
    [
        [AgentCompleted("A", 3), AgentCompleted("B", 1)],
        [AgentFailed("A", "wrong", drained=True, void=True), AgentCompleted("B", 1)],
    ],
    ids=["too few", "wrong"],
)
def test_a_load_is_not_complete_before_as_many_agents_as_one_of_them_names(events: list[Event]) -> None:
    """Nor if one of them has written something wrong."""
    session = LoadSession("d-1", PATIENCE_S)
    session.handle(Registered(frozenset("ABC")), 0.0)
    for event in events:
        assert ReportLoaded not in map(type, session.handle(event, 0.0))
    assert session.open_agents == {"C"}


@pytest.mark.parametrize(
    ("events", "landed"),
    [
        ([PrefixWritten("A", 8)], 0),
        ([PrefixWritten("A", 8), PrefixWritten("B", 4)], 4),
        ([PrefixWritten("A", 8), PrefixWritten("B", 4), PrefixWritten("B", 12), PrefixWritten("A", 4)], 8),
        ([PrefixWritten("A", 8), AgentCompleted("B", 2)], 8),
        ([PrefixWritten("A", 8), PrefixWritten("B", 4), AgentGone("A", "gone"), PrefixWritten("A", 12)], 4),
        ([AgentGone("A", "gone"), PrefixWritten("B", 4)], 0),
        ([PrefixWritten("A", 8), AgentCompleted("B", 2), AgentFailed("A", "wrong", drained=True, void=True)], 0),
        ([PrefixWritten("A", 8), AgentFailed("B", "wrong", drained=True, void=True)], 0),
        ([PrefixWritten("A", 8), AgentCompleted("B", 2), AgentFailed("B", "late", drained=True, void=True)], 8),
    ],
)
def test_a_prefix_has_landed_when_every_agent_has_written_its_part(events: list[Event], landed: int) -> None:
    session = LoadSession("d-1", PATIENCE_S)
    session.handle(Registered(AGENTS), 0.0)
    for event in events:
        session.handle(event, 0.0)
    assert session.landed_tokens == landed
