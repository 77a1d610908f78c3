"""The decode session under everything that prefill ranks, an engine and a clock may do, checked against a plain model.

The model knows which ranks are really able to write. A rank stops for good before it says a final word, as the real one
does; words are repeated, reordered, made up by strangers, and contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from layerpush.core.load_protocol import (
    Aborted,
    Action,
    Cancel,
    Cancelled,
    Clear,
    Completed,
    Event,
    Failed,
    Gone,
    Park,
    Registered,
    ReportAborted,
    ReportFailed,
    ReportLoaded,
    Silent,
    State,
    Tick,
    TimedOut,
)
from layerpush.core.load_session import LoadSession

PATIENCE_S, RETRY_S = 5.0, 1.0
AGENTS = ("A", "B", "C")
FINAL: list[Callable[[str, int], Event]] = [
    Completed,
    lambda agent, _: Failed(agent, "failed", drained=True),
    lambda agent, _: Cancelled(agent),
    lambda agent, _: Gone(agent, "gone"),
]


class DecodeMachine(RuleBasedStateMachine):
    session_type = LoadSession
    on_the_way = Bundle("on_the_way")
    """Words that were said and have not arrived."""

    @initialize(count=st.integers(1, 3))
    def register(self, count: int) -> None:
        self.session = self.session_type("d-1", PATIENCE_S, RETRY_S)
        self.now = 0.0
        self.writers = set(AGENTS[:count])
        """Ranks that may still write."""
        self.needed = count
        self.wrote: set[str] = set()
        self.reports: list[Action] = []
        self.asked: dict[str, float] = {}
        self.aborted = False
        self.left_at: float | None = None
        self._send(Registered(frozenset(self.writers)))

    @precondition(lambda self: self.writers)
    @rule(target=on_the_way, data=st.data(), kind=st.sampled_from(FINAL))
    def end(self, data: object, kind: Callable[[str, int], Event]) -> Event:
        """A rank stops writing for good, and says so."""
        agent = data.draw(st.sampled_from(sorted(self.writers)))  # type: ignore[attr-defined]
        self.writers.remove(agent)
        if kind is Completed:
            self.wrote.add(agent)
        return kind(agent, self.needed)

    @rule(target=on_the_way, word=on_the_way)
    def repeat(self, word: Event) -> Event:
        return word

    @precondition(lambda self: len(self.writers) < self.needed)
    @rule(target=on_the_way, data=st.data(), kind=st.sampled_from(FINAL[1:]))
    def contradict(self, data: object, kind: Callable[[str, int], Event]) -> Event:
        """Who has stopped may say so in other words."""
        stopped = sorted(set(AGENTS[: self.needed]) - self.writers)
        return kind(data.draw(st.sampled_from(stopped)), self.needed)  # type: ignore[attr-defined]

    @rule(word=consumes(on_the_way))
    def arrive(self, word: Event) -> None:
        self._send(word)

    @rule(agent=st.sampled_from(AGENTS))
    def fail_without_draining(self, agent: str) -> None:
        if agent in self.session.open_agents:
            self._send(Failed(agent, "failing", drained=False))

    @rule(agent=st.sampled_from(AGENTS))
    def fall_silent(self, agent: str) -> None:
        self._send(Silent(agent, "silent"))

    @rule(kind=st.sampled_from(FINAL), needed=st.integers(1, 3))
    def meddle(self, kind: Callable[[str, int], Event], needed: int) -> None:
        self._send(kind("X", needed))

    @rule()
    def abort(self) -> None:
        self.aborted |= self.session.state in (State.WAITING, State.CANCELLING)
        self._send(Aborted("aborted"))

    @rule()
    def be_late(self) -> None:
        self._send(TimedOut("late"))

    @rule(seconds=st.floats(0.0, 3.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._send(Tick())

    @precondition(lambda self: self.session.next_due(self.now) is not None)
    @rule()
    def pass_time_until_due(self) -> None:
        due = self.session.next_due(self.now)
        assert due is not None
        assert due >= self.now
        self.now = due
        before = (self.session.state, len(self.reports), dict(self.asked))
        self._send(Tick())
        assert before != (self.session.state, len(self.reports), self.asked), "due, but nothing to do"

    def _send(self, event: Event) -> None:
        if self.session.state is State.CLOSED:
            return
        before = self.session.state
        for action in self.session.handle(event, self.now):
            self._check(action)
        if before is State.WAITING and self.session.state is not State.WAITING:
            self.left_at = self.now

    def _check(self, action: Action) -> None:
        if isinstance(action, Cancel):
            assert set(action.agents) == self.session.open_agents
            self.asked.update(dict.fromkeys(action.agents, self.now))
            return
        self.reports.append(action)
        if isinstance(action, Park):
            assert not self.aborted, "the engine holds the blocks of what it aborted"
            assert self.left_at is not None
            assert self.now >= self.left_at + PATIENCE_S
            return
        assert not self.writers, f"{action} while {self.writers} may write"
        if isinstance(action, ReportLoaded):
            assert len(self.wrote) == self.needed
        assert isinstance(action, Clear) or isinstance(action, ReportAborted) == self.aborted

    @invariant()
    def it_is_reported_once(self) -> None:
        if hasattr(self, "reports"):
            kinds = tuple(type(report) for report in self.reports)
            assert kinds in ((), (ReportLoaded,), (ReportFailed,), (ReportAborted,), (Park,), (Park, Clear))
            ended = kinds in ((ReportLoaded,), (ReportFailed,), (ReportAborted,), (Park, Clear))
            assert (self.session.state is State.CLOSED) == ended
            assert (self.session.state is State.PARKED) == (kinds == (Park,))

    @invariant()
    def who_may_write_is_asked(self) -> None:
        if hasattr(self, "reports") and self.session.state in (State.CANCELLING, State.ABORTING, State.PARKED):
            assert self.session.open_agents <= self.asked.keys()

    def teardown(self) -> None:
        """Whatever happened: when every rank has stopped and said so, it is over."""
        if not hasattr(self, "reports"):
            return
        for agent in sorted(self.session.agents):
            self.writers.discard(agent)
            self._send(Cancelled(agent))
        assert self.session.state is State.CLOSED
        self.it_is_reported_once()


DecodeMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestDecodeMachine = DecodeMachine.TestCase
