"""One awaited push on a decode rank, rule by rule, and every event in every state."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest

from layerpush.core.load_protocol import (
    TRANSITIONS,
    Aborted,
    Action,
    Cancel,
    Cancelled,
    Clear,
    Completed,
    Event,
    Failed,
    FinalStatus,
    Gone,
    Park,
    Registered,
    RegistrationFailed,
    ReportAborted,
    ReportFailed,
    ReportLoaded,
    Silent,
    State,
    Tick,
    TimedOut,
)
from layerpush.core.load_session import LoadSession
from layerpush.core.machine import IllegalTransitionError

PATIENCE_S, RETRY_S = 5.0, 1.0
CAUSES: dict[str, Event] = {
    "a failure": Failed("A", "why", drained=False),
    "silence": Silent("A", "why"),
    "an abort": Aborted("why"),
    "a deadline": TimedOut("why"),
}


def waiting(*agents: str) -> LoadSession:
    """Registered with these agents at time 0."""
    session = LoadSession("d-1", PATIENCE_S, RETRY_S)
    assert session.handle(Registered(frozenset(agents or ("A",))), 0.0) == []
    return session


def parked(*agents: str) -> LoadSession:
    session = waiting(*agents)
    session.handle(TimedOut("why"), 0.0)
    session.handle(Tick(), PATIENCE_S)
    assert session.state is State.PARKED
    return session


def test_the_last_needed_completion_ends_it_well() -> None:
    session = waiting("A", "B")
    assert session.handle(Completed("A", 2), 1.0) == []
    assert (session.state, session.landed, session.open_agents) == (State.WAITING, 1, {"B"})
    assert session.handle(Completed("B", 2), 2.0) == [ReportLoaded()]
    assert (session.state, session.cause, session.open_agents) == (State.CLOSED, None, frozenset())


def test_more_agents_than_are_needed_do_not_delay_it() -> None:
    assert waiting("A", "B", "C").handle(Completed("B", 1), 1.0) == [ReportLoaded()]


def test_fewer_agents_than_are_needed_end_it_badly() -> None:
    session = waiting("A")
    assert session.handle(Completed("A", 2), 1.0) == [ReportFailed("only 1 of 2 prefill ranks wrote their part")]


def test_a_completion_cannot_lower_what_is_needed() -> None:
    session = waiting("A", "B")
    session.handle(Completed("A", 2), 1.0)
    assert session.handle(Completed("B", 1), 1.0) == [ReportLoaded()]
    session = waiting("A", "B", "C")
    session.handle(Completed("A", 3), 1.0)
    assert session.handle(Completed("B", 1), 1.0) == []


@pytest.mark.parametrize("event", [RegistrationFailed("why"), Aborted("why"), TimedOut("why")])
def test_what_nobody_knows_of_ends_at_once(event: Event) -> None:
    session = LoadSession("d-1", PATIENCE_S)
    assert session.handle(event, 0.0) == [(ReportAborted if isinstance(event, Aborted) else ReportFailed)("why")]
    assert (session.state, session.cause) == (State.CLOSED, "why")


def test_a_registration_needs_somebody_to_go_to() -> None:
    with pytest.raises(IllegalTransitionError, match="d-1: registered with nobody"):
        LoadSession("d-1", PATIENCE_S).handle(Registered(frozenset()), 0.0)


@pytest.mark.parametrize(
    "event", [Failed("A", "why", drained=True), Gone("A", "why"), Cancelled("A")], ids=lambda e: type(e).__name__
)
def test_a_final_word_of_the_only_agent_ends_it(event: Event) -> None:
    session = waiting("A")
    [action] = session.handle(event, 1.0)
    assert isinstance(action, ReportFailed)
    assert session.cause == action.reason
    assert session.cause == ("agent A cancelled the push" if isinstance(event, Cancelled) else "why")


@pytest.mark.parametrize("cause", CAUSES)
def test_who_may_still_write_is_asked_to_stop(cause: str) -> None:
    session = waiting("A", "B", "C")
    assert session.handle(CAUSES[cause], 1.0) == [Cancel(("A", "B", "C"))]
    aborted = isinstance(CAUSES[cause], Aborted)
    assert (session.state, session.cause) == (State.ABORTING if aborted else State.CANCELLING, "why")
    assert session.open_agents == {"A", "B", "C"}


def test_a_failure_of_one_agent_cancels_the_others() -> None:
    session = waiting("A", "B")
    assert session.handle(Failed("A", "why", drained=True), 1.0) == [Cancel(("B",))]
    assert session.statuses == {"A": FinalStatus.FAILED}
    assert session.handle(Cancelled("B"), 1.1) == [ReportFailed("why")]


def test_a_failure_that_has_not_drained_is_no_final_status() -> None:
    session = waiting("A", "B")
    assert session.handle(Failed("A", "why", drained=False), 1.0) == [Cancel(("A", "B"))]
    assert session.open_agents == {"A", "B"}
    session.handle(Cancelled("B"), 1.1)
    assert session.handle(Failed("A", "later", drained=True), 1.2) == [ReportFailed("why")]


def test_a_completion_that_overtakes_the_cancellation_still_counts() -> None:
    session = waiting("A", "B")
    session.handle(Completed("A", 2), 0.5)
    assert session.handle(TimedOut("why"), 1.0) == [Cancel(("B",))]
    assert session.handle(Completed("B", 2), 1.1) == [ReportLoaded()]


def test_a_completion_counts_for_nothing_once_the_engine_has_aborted() -> None:
    session = waiting("A")
    session.handle(Aborted("aborted"), 1.0)
    assert session.handle(Completed("A", 1), 1.1) == [ReportAborted("aborted")]


@pytest.mark.parametrize(
    ("first", "second"), [(TimedOut("late"), Aborted("aborted")), (Aborted("aborted"), TimedOut("late"))]
)
def test_an_aborted_request_keeps_its_blocks_for_as_long_as_it_takes(first: Event, second: Event) -> None:
    session = waiting("A")
    session.handle(first, 0.0)
    assert session.handle(second, 0.5) == []
    assert session.handle(Tick(), 100.0) == [Cancel(("A",))]
    assert session.state is State.ABORTING
    assert session.handle(Cancelled("A"), 101.0) == [ReportAborted(first.reason)]  # type: ignore[attr-defined]


def test_cancels_are_repeated_to_who_has_not_answered() -> None:
    session = waiting("A", "B", "C")
    session.handle(TimedOut("why"), 10.0)
    assert session.next_due(10.0) == 11.0
    assert session.handle(Tick(), 10.9) == []
    assert session.handle(Tick(), 11.0) == [Cancel(("A", "B", "C"))]
    session.handle(Cancelled("A"), 11.5)
    assert session.next_due(11.5) == 13.0
    assert session.next_due(14.0) == 14.0
    assert session.handle(Tick(), 13.3) == [Cancel(("B", "C"))]
    assert session.next_due(13.3) == 15.0, "patience ends before the next one is due"


@pytest.mark.parametrize("end", [Aborted("why"), TimedOut("why")], ids=repr)
@pytest.mark.parametrize(
    ("patience_s", "retry_s", "pauses"),
    [(5.0, 1.0, [1, 2, 4, 5, 5]), (20.0, 1.0, [1, 2, 4, 8, 16, 20, 20]), (0.5, 1.0, [1, 1, 1])],
)
def test_cancels_become_rare_but_never_cease(end: Event, patience_s: float, retry_s: float, pauses: list[int]) -> None:
    """Each of them waits in the queue of a prefill engine that is stopped, for as long as it is."""
    session = LoadSession("d-1", patience_s, retry_s)
    session.handle(Registered(frozenset("A")), 0.0)
    session.handle(end, 0.0)
    now, asked = 0.0, [0.0]
    while len(asked) <= len(pauses):
        due = session.next_due(now)
        assert due is not None
        now = due
        actions = session.handle(Tick(), now)
        assert actions
        asked += [now] * sum(isinstance(action, Cancel) for action in actions)
    assert [after - before for before, after in itertools.pairwise(asked)] == pauses


def test_the_engine_does_not_wait_for_ever_but_the_blocks_do() -> None:
    session = waiting("A", "B")
    session.handle(TimedOut("why"), 10.0)
    assert session.handle(Tick(), 14.5) == [Cancel(("A", "B"))]
    assert (session.handle(Tick(), 14.9), session.next_due(14.9)) == ([], 15.0)
    assert session.handle(Tick(), 15.0) == [Park("why")]
    assert (session.state, session.next_due(15.0)) == (State.PARKED, 16.5)
    assert session.handle(Tick(), 16.5) == [Cancel(("A", "B"))]
    assert session.handle(Cancelled("A"), 17.0) == []
    assert session.handle(Completed("B", 2), 600.0) == [Clear()]
    assert session.state is State.CLOSED


@pytest.mark.parametrize(
    "word", [Completed("A", 1), Failed("A", "x", drained=True), Gone("A", "x"), Cancelled("A")], ids=repr
)
def test_a_parked_request_is_over_with_any_final_word(word: Event) -> None:
    assert parked("A").handle(word, 100.0) == [Clear()]


@pytest.mark.parametrize(
    "event", [Aborted("x"), TimedOut("x"), Silent("A", "x"), Failed("A", "x", drained=False)], ids=repr
)
def test_a_parked_request_stays_so_without_one(event: Event) -> None:
    session = parked("A")
    assert session.handle(event, 100.0) == []
    assert (session.state, session.cause) == (State.PARKED, "why")


def test_waiting_and_registering_need_no_clock() -> None:
    assert LoadSession("d-1", PATIENCE_S).next_due(0.0) is None
    session = waiting("A")
    assert session.next_due(0.0) is None
    assert session.handle(Tick(), 100.0) == []


WORDS: list[Event] = [
    Completed("A", 2), Failed("A", "x", drained=True), Failed("A", "x", drained=False),
    Cancelled("A"), Gone("A", "x"), Silent("A", "x"),
]  # fmt: skip


@pytest.mark.parametrize("state", list(State)[1:-1], ids=lambda state: state.name)
@pytest.mark.parametrize("event", WORDS, ids=repr)
@pytest.mark.parametrize("first", [Completed("A", 2), Cancelled("A"), Gone("A", "x"), Failed("A", "x", drained=True)])
def test_after_its_final_word_an_agent_is_not_listened_to(state: State, event: Event, first: Event) -> None:
    session = waiting("A", "B") if state is not State.PARKED else parked("A", "B")
    if state is State.CANCELLING:
        session.handle(TimedOut("why"), 0.0)
    if state is State.ABORTING:
        session.handle(Aborted("why"), 0.0)
    session.handle(first, 6.0)
    before = (session.state, session.statuses.copy(), session.cause)
    assert session.handle(event, 6.0) == []
    assert (session.state, session.statuses, session.cause) == before


@pytest.mark.parametrize("event", WORDS, ids=repr)
def test_what_an_unknown_agent_says_changes_nothing(event: Event) -> None:
    for session in (waiting("B"), parked("B")):
        before = copy.deepcopy(vars(session))
        assert session.handle(event, 9.0) == []
        assert vars(session) == before


EVENTS: list[Event] = [
    Registered(frozenset({"A", "B"})), RegistrationFailed("u"), Aborted("d"), TimedOut("o"), Tick(),
    *(event
      for agent in "AB"
      for event in (Completed(agent, 1), Completed(agent, 2), Failed(agent, "f", drained=True),
                    Failed(agent, "f", drained=False), Cancelled(agent), Gone(agent, "g"), Silent(agent, "s"))),
]  # fmt: skip
STEP_S = 2.5


def explored() -> Iterator[tuple[LoadSession, Event, LoadSession, list[Action]]]:
    """Every event in every situation that a request with two agents can be in."""
    start = LoadSession("d-1", PATIENCE_S, RETRY_S)
    fresh, seen = [(start, 0)], {_key(start, 0)}
    while fresh:
        session, clock = fresh.pop()
        for event in EVENTS:
            if not session.accepts(type(event)):
                with pytest.raises(IllegalTransitionError):
                    session.handle(event, clock * STEP_S)
                continue
            after, later = copy.deepcopy(session), clock + isinstance(event, Tick)
            actions = after.handle(event, later * STEP_S)
            yield session, event, after, actions
            key = _key(after, later)
            if key not in seen and later <= 3:
                seen.add(key)
                fresh.append((after, later))


def _key(session: LoadSession, clock: int) -> tuple[object, ...]:
    """What decides how it goes on: not what it says about it."""
    fields = {**vars(session), "cause": None}
    return clock, *(str(sorted(value) if isinstance(value, set | frozenset) else value) for value in fields.values())


def test_every_event_in_every_state() -> None:
    """No row of the table is dead, no way leads round it, and what is given back is nobody's to write into."""
    taken = set()
    for before, event, after, actions in explored():
        taken.add((before.state, type(event), after.state))
        released = [action for action in actions if not isinstance(action, Cancel | Park)]
        assert len(released) == (after.state is State.CLOSED)
        assert [type(action) for action in actions].count(Park) == (
            before.state is not State.PARKED and after.state is State.PARKED
        )
        if released:
            assert after.landed >= 1 or not after.open_agents
        if any(isinstance(action, Clear) for action in released):
            assert before.state is State.PARKED
        if any(isinstance(action, ReportLoaded) for action in released):
            assert before.state is not State.ABORTING
        if any(isinstance(action, ReportAborted) for action in released):
            assert before.state is State.ABORTING or isinstance(event, Aborted)
        for action in actions:
            if isinstance(action, Cancel):
                assert set(action.agents) <= after.open_agents
    table = {(state, event, to) for state, row in TRANSITIONS.items() for event, tos in row.items() for to in tos}
    assert taken == table


def test_a_closed_session_accepts_nothing() -> None:
    session = waiting("A")
    session.handle(Completed("A", 1), 0.0)
    for event in EVENTS:
        with pytest.raises(IllegalTransitionError, match=f"d-1: {type(event).__name__} while CLOSED"):
            session.handle(event, 0.0)
