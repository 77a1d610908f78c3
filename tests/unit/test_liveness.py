"""Pings and probes of prefill processes, and the conclusions from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from layerpush.core.liveness import (
    PROBE_GAP_S,
    PROBE_LOST_S,
    PeerAction,
    PeerWatch,
    Reconnect,
    ReportGone,
    ReportSilent,
    SendPing,
    StartProbe,
    Verdict,
)

T = 20.0
BEAT_S = T / 4

PING, PROBE, RECONNECT = SendPing("P", "A", True), StartProbe("P", "A"), Reconnect("P", "A")
GONE = ReportGone("P", "A", "the process of prefill agent A has ended")
SILENT = ReportSilent("A", "nothing came from prefill agent A for 20 s")
ALIVE, SPEAKS_LAYERPUSH, ENDED, REPLACED, UNKNOWN = Verdict


def watching(*agents: str, speaks_layerpush: bool = True) -> PeerWatch:
    """One session, added at time 0, with agents of engine P."""
    watch = PeerWatch(T)
    watch.await_agents("P", agents or ("A",), 0.0)
    for agent in agents or ("A",):
        watch.on_message(agent, 0.0, speaks_layerpush)
    return watch


def course(
    watch: PeerWatch, until: float, start: float = 0.0, verdict: Verdict | None = None
) -> Iterator[tuple[float, PeerAction]]:
    """The orders while only time passes. Each probe ends at once with this verdict."""
    now = start
    while (due := watch.next_due(now)) is not None and due <= until:
        now = due
        orders = watch.due(now)
        assert orders, f"due at {now}, but nothing to do"
        for order in orders:
            yield now, order
            if isinstance(order, StartProbe) and verdict is not None:
                watch.probe_ended(order.engine_id, order.agent, verdict, now)


def times(order: PeerAction | type[PeerAction], orders: Iterable[tuple[float, PeerAction]]) -> list[float]:
    return [at for at, one in orders if one == order or type(one) is order]


def ordered(*args: Any, **kwargs: Any) -> list[PeerAction]:
    return [order for _, order in course(*args, **kwargs)]


def test_a_watch_without_sessions_gives_no_orders() -> None:
    watch = PeerWatch(T)
    assert (watch.next_due(0.0), watch.due(100.0)) == (None, [])


def test_an_agent_that_answers_gets_only_pings() -> None:
    watch = watching()
    for beat in range(1, 20):
        now = beat * BEAT_S
        assert watch.next_due(now - 1) == now
        assert watch.due(now) == [PING]
        watch.on_message("A", now + 0.01, speaks_layerpush=True)
    assert watch.next_due(now) == now + BEAT_S


def test_a_silent_agent_is_probed_after_half_the_timeout_and_reported_once() -> None:
    seen = list(course(watching(), 3 * T, verdict=UNKNOWN))
    assert times(SILENT, seen) == [T]
    assert times(PROBE, seen) == [T / 2 + BEAT_S * beat for beat in range(11)]
    assert times(PING, seen) == [BEAT_S * beat for beat in range(1, 13)]


def test_a_second_silence_is_reported_again() -> None:
    watch = watching()
    assert times(SILENT, course(watch, 30.0)) == [T]
    watch.on_message("A", 30.0, speaks_layerpush=True)
    assert times(SILENT, course(watch, 100.0, 30.0)) == [30.0 + T]


def test_a_pause_of_this_process_is_not_silence_of_the_agent() -> None:
    watch = watching()
    assert watch.due(10 * T) == [PING, PROBE]
    assert times(SILENT, course(watch, 20 * T, 10 * T)) == [10 * T + T - BEAT_S]


def test_an_agent_is_silent_until_a_message_comes() -> None:
    watch = watching()
    assert times(SILENT, course(watch, 25.0)) == [T]
    assert [watch.is_silent(name) for name in ("A", "nobody")] == [True, False]
    assert times(PING, course(watch, 40.0, 25.0)) == [30.0, 35.0, 40.0], "else nothing would end it"
    watch.on_message("A", 40.0, True)
    assert not watch.is_silent("A")
    assert times(SILENT, course(watch, 100.0, 40.0)) == [40.0 + T]


def test_an_unidentified_agent_gets_heartbeats_and_is_never_reported_silent() -> None:
    orders = list(course(watching(speaks_layerpush=False), 2 * T, verdict=ALIVE))
    assert times(PROBE, orders) == [10.0, 20.0, 30.0, 40.0]
    assert {order for _, order in orders} == {PROBE, SendPing("P", "A", False)}


def test_an_agent_known_by_its_side_channel_can_be_reported_silent() -> None:
    """No message ever came from the agent. The agent had heartbeats; the verdict brings the first ping."""
    orders = list(course(watching(speaks_layerpush=False), 3 * T, verdict=SPEAKS_LAYERPUSH))
    assert times(SendPing("P", "A", False), orders) == [5.0, 10.0]
    assert times(PING, orders)[:3] == [10.0, 15.0, 20.0]
    assert times(SILENT, orders) == [10.0 + T - BEAT_S]


def test_a_silent_agent_is_reported_even_if_its_side_channel_answers() -> None:
    assert times(SILENT, course(watching(), 3 * T, verdict=ALIVE)) == [T]


def test_a_dead_process_is_reported_gone_within_a_second() -> None:
    watch = watching()
    watch.send_failed("A", 1.0)
    assert (watch.next_due(1.0), watch.due(1.0)) == (1.0, [PROBE])
    watch.probe_ended("P", "A", ENDED, 1.1)
    assert watch.due(1.1) == [PING], "a living process would answer"
    assert (watch.next_due(1.1), watch.due(1.59)) == (1.1 + PROBE_GAP_S, [])
    assert watch.due(1.1 + PROBE_GAP_S) == [PROBE]
    watch.probe_ended("P", "A", ENDED, 1.7)
    assert (watch.next_due(1.7), watch.due(1.7)) == (1.7, [GONE])
    assert (watch.next_due(1.7), watch.due(100.0)) == (None, [])


def test_a_failed_send_confirms_a_death_found_by_a_probe() -> None:
    watch = watching()
    assert ordered(watch, T / 2) == [PING, PING, PROBE]
    watch.probe_ended("P", "A", ENDED, 10.0)
    assert watch.due(10.0) == [PING]
    watch.send_failed("A", 10.0)
    assert watch.due(10.4) == []
    assert watch.due(10.5) == [PROBE]
    watch.probe_ended("P", "A", ENDED, 10.5)
    assert GONE in watch.due(10.5)


def test_a_send_failure_after_both_probes_causes_a_third_probe() -> None:
    watch = watching()
    watch.due(10.0)
    watch.probe_ended("P", "A", ENDED, 10.0)
    assert watch.due(10.5) == [PING, PROBE]
    watch.probe_ended("P", "A", ENDED, 10.5)
    assert watch.due(10.5) == [PING]
    watch.send_failed("A", 10.5)
    assert watch.due(10.5) == [PROBE]
    watch.probe_ended("P", "A", ENDED, 10.6)
    assert GONE in watch.due(10.6)


@pytest.mark.parametrize("between", ["a word", "another verdict"])
def test_evidence_against_a_death_restarts_the_proof(between: str) -> None:
    watch = watching()
    watch.send_failed("A", 1.0)
    watch.due(1.0)
    watch.probe_ended("P", "A", ENDED, 1.0)
    now = 1.0 + PROBE_GAP_S
    if between == "a word":
        watch.on_message("A", 1.1, speaks_layerpush=True)
    else:
        assert PROBE in watch.due(now)
        watch.probe_ended("P", "A", UNKNOWN, now)
    watch.send_failed("A", now)
    orders = ordered(watch, now + T, now, ENDED)
    assert orders[: orders.index(GONE)].count(PROBE) == 2


def test_an_unanswered_probe_is_no_evidence_against_a_death() -> None:
    watch = watching()
    watch.send_failed("A", 1.0)
    watch.due(1.0)
    watch.probe_ended("P", "A", ENDED, 1.0)
    assert PROBE in watch.due(2.0)
    assert PROBE in watch.due(2.0 + PROBE_LOST_S)
    watch.probe_ended("P", "A", ENDED, 2.1 + PROBE_LOST_S)
    assert GONE in watch.due(2.1 + PROBE_LOST_S)


def test_a_probe_started_before_a_message_proves_no_death() -> None:
    watch = watching()
    watch.send_failed("A", 1.0)
    assert PROBE in watch.due(1.0)
    watch.on_message("A", 1.1, speaks_layerpush=True)
    watch.probe_ended("P", "A", ENDED, 1.2)
    watch.send_failed("A", 1.3)
    now = 1.2 + BEAT_S
    assert PROBE in watch.due(now)
    watch.probe_ended("P", "A", ENDED, now)
    assert GONE not in watch.due(now)


def test_a_living_agent_is_reconnected_after_a_failed_send() -> None:
    watch = watching("A", "B")
    watch.send_failed("A", 1.0)
    watch.send_failed("B", 1.0)
    assert watch.due(1.0) == [PROBE]
    watch.probe_ended("P", "A", ALIVE, 1.1)
    assert (watch.next_due(1.1), watch.due(1.1)) == (1.1, [RECONNECT, StartProbe("P", "B")])
    watch.on_message("B", 1.2, speaks_layerpush=True)
    watch.probe_ended("P", "B", ALIVE, 1.3)
    assert watch.due(1.3) == []
    watch.send_failed("A", 1.4)
    assert times(StartProbe, course(watch, 10.0, 1.4)) == [1.1 + BEAT_S]


@pytest.mark.parametrize("cure", ["a word", "a connection", "neither"])
def test_a_failed_send_is_evidence_until_a_message_or_a_reconnection(cure: str) -> None:
    watch = watching()
    watch.send_failed("A", 1.0)
    watch.due(1.0)
    watch.probe_ended("P", "A", ALIVE, 1.0)
    assert ordered(watch, 1.1, 1.0) == [RECONNECT]
    if cure == "a word":
        watch.on_message("A", 1.1, speaks_layerpush=True)
    elif cure == "a connection":
        watch.reconnected(["A"])
    seen = ordered(watch, 30.0, 1.1, ENDED)
    assert seen.count(PROBE) >= 2
    assert (GONE in seen) == (cure == "neither")
    assert RECONNECT not in seen


@pytest.mark.parametrize("sign", ["a word", "a connection to others"])
def test_weak_signs_after_a_dropped_connection_do_not_prevent_a_gone_report(sign: str) -> None:
    """A message may be older than the failed send, and no later send can fail."""
    watch = watching()
    watch.send_failed("A", 1.0)
    watch.connection_dropped("A")
    if sign == "a word":
        watch.on_message("A", 1.1, speaks_layerpush=True)
    else:
        watch.reconnected(["the next process"])
    assert GONE in ordered(watch, 30.0, 1.1, ENDED)


@pytest.mark.parametrize("trouble", ["lost", "cut"])
def test_reconnection_is_retried_at_each_sign_of_life(trouble: str) -> None:
    """A reconnection may fail."""
    watch = watching()
    if trouble == "lost":
        watch.send_failed("A", 1.0)
    else:
        watch.connection_dropped("A")
    tries = times(RECONNECT, course(watch, 1.0 + 3 * BEAT_S, 1.0, ALIVE))
    assert tries == [1.0 + beat * BEAT_S for beat in range(4)]
    watch.reconnected(["A"])
    watch.on_message("A", 17.0, speaks_layerpush=True)
    assert ordered(watch, 17.0 + T / 2 - 1, 17.0) == [PING, PING]


def test_an_agent_whose_connection_we_dropped_is_never_reported_gone() -> None:
    """Our own act proves no death, even if the side channel says that the process has ended."""
    watch = watching()
    watch.connection_dropped("A")
    orders = []
    for _, order in course(watch, 3 * T, 1.0, ENDED):
        orders.append(order)
        if isinstance(order, SendPing):
            watch.connection_dropped("A")
    assert orders.count(PROBE) > 2
    assert GONE not in orders


def test_an_engine_has_one_probe_at_a_time_and_every_agent_gets_a_turn() -> None:
    watch = watching("A", "B", "C")
    watch.await_agents("Q", ["D"], 0.0)
    for agent in "ABCD":
        watch.send_failed(agent, 1.0)
    assert watch.due(1.0) == [PROBE, StartProbe("Q", "D")]
    assert watch.due(2.0) == []
    watch.probe_ended("P", "A", UNKNOWN, 3.0)
    assert watch.due(3.0) == [StartProbe("P", "B")]
    watch.probe_ended("P", "B", ENDED, 3.0)
    assert [order for order in watch.due(3.0) if isinstance(order, StartProbe)] == [StartProbe("P", "C")]
    watch.probe_ended("P", "C", UNKNOWN, 3.1)
    assert watch.due(3.0 + PROBE_GAP_S) == [StartProbe("P", "B")]


def test_a_probe_without_a_verdict_times_out() -> None:
    watch = watching(speaks_layerpush=False)
    assert times(StartProbe, course(watch, 100.0)) == [10.0, 10.0 + PROBE_LOST_S, 10.0 + 2 * PROBE_LOST_S, 100.0]


def test_sessions_are_counted() -> None:
    watch = watching("A", "B")
    watch.await_agents("P", ["A"], 1.0)
    watch.release_agents("P", ["A", "B"])
    assert len(watch) == 1
    assert ordered(watch, BEAT_S) == [PING]
    watch.send_failed("A", 8.0)
    watch.due(8.0)
    watch.probe_ended("P", "A", ALIVE, 8.0)
    watch.release_agents("P", ["A", "nobody"])
    assert (len(watch), watch.next_due(9.0)) == (0, None)
    watch.on_message("A", 9.0, speaks_layerpush=True)
    watch.send_failed("A", 9.0)
    watch.probe_ended("P", "A", ENDED, 9.0)
    assert (len(watch), watch.due(100.0)) == (0, [])
    assert not any([watch._engines, watch._engine_of])


def test_a_removed_agent_that_returns_is_watched_from_the_start() -> None:
    watch = watching()
    watch.send_failed("A", 1.0)
    watch.due(1.0)
    watch.release_agents("P", ["A"])
    watch.probe_ended("P", "A", ENDED, 1.1)
    watch.await_agents("P", ["A"], 50.0)
    assert watch.next_due(50.0) == 50.0 + BEAT_S
    watch.probe_ended("P", "A", ALIVE, 50.0)
    assert watch.due(50.0) == []


def test_a_session_added_after_a_death_gets_the_gone_report() -> None:
    watch = watching()
    watch.send_failed("A", 1.0)
    for now in (1.0, 1.0 + PROBE_GAP_S):
        assert PROBE in watch.due(now)
        watch.probe_ended("P", "A", ENDED, now)
    assert GONE in watch.due(2.0)
    watch.on_message("A", 2.0, speaks_layerpush=True)
    watch.await_agents("P", ["A"], 3.0)
    assert (watch.next_due(3.0), watch.due(3.0), watch.next_due(3.0)) == (3.0, [GONE], None)


class WatchMachine(RuleBasedStateMachine):
    """All events in any order, against the promises."""

    def __init__(self) -> None:
        super().__init__()
        self.timeout_s = 4.0
        self.watch = PeerWatch(self.timeout_s)
        self.now = 100.0
        self.sessions: Counter[str] = Counter()
        self.since: dict[str, float] = {}
        """The start of an agent's unbroken watch."""
        self.heard_at: dict[str, float] = {}
        self.speaking: set[str] = set()
        self.unanswered: dict[str, float] = {}
        """The time of the first ping since an agent's last message."""
        self.lost_since: dict[str, float] = {}
        self.started: dict[str, tuple[str, float]] = {}
        self.proofs: dict[str, list[tuple[float, float]]] = {}
        """(begun, over) of consecutive probes that found an agent to have ended."""
        self.cut_since: dict[str, float] = {}
        self.reconnects: set[str] = set()
        """Engines with a living agent that sends do not reach."""
        self.gone: set[str] = set()
        self.silent: set[str] = set()
        self.log: list[tuple[float, PeerAction]] = []

    agents = st.sampled_from("ABCD")

    @staticmethod
    def engine(agent: str) -> str:
        return "P" if agent in "ABC" else "Q"

    @rule(agent=agents)
    def add(self, agent: str) -> None:
        self.watch.await_agents(self.engine(agent), [agent], self.now)
        self.sessions[agent] += 1
        if agent in self.silent:
            self.silent.remove(agent)
            self.unanswered.pop(agent, None)
        if self.sessions[agent] == 1:
            self.since[agent] = self.now
            self.heard_at[agent] = -1.0
            self._forget(agent)

    @rule(agent=agents)
    def remove(self, agent: str) -> None:
        if self.sessions[agent]:
            self.watch.release_agents(self.engine(agent), [agent])
            self.sessions[agent] -= 1

    @rule(agent=agents, speaks_layerpush=st.booleans())
    def hear(self, agent: str, speaks_layerpush: bool) -> None:
        self.watch.on_message(agent, self.now, speaks_layerpush)
        if self.sessions[agent] and agent not in self.gone:
            self.heard_at[agent] = self.now
            self.proofs[agent] = []
            if agent not in self.cut_since:
                self.lost_since.pop(agent, None)
            self.silent.discard(agent)
            self.unanswered.pop(agent, None)
            if speaks_layerpush:
                self.speaking.add(agent)

    @rule(agent=agents)
    def lose(self, agent: str) -> None:
        self.watch.send_failed(agent, self.now)
        if self.sessions[agent]:
            self.lost_since.setdefault(agent, self.now)

    @rule(agent=agents)
    def cut(self, agent: str) -> None:
        self.watch.connection_dropped(agent)
        if self.sessions[agent]:
            self.cut_since.setdefault(agent, self.now)

    @rule(engine=st.sampled_from("PQ"), agents=st.sets(agents))
    def reconnect(self, engine: str, agents: set[str]) -> None:
        """With the same ranks, or with others."""
        self.watch.reconnected([agent for agent in agents if self.engine(agent) == engine])
        for agent in agents:
            if self.engine(agent) == engine and agent not in self.gone:
                self.lost_since.pop(agent, None)
                self.cut_since.pop(agent, None)

    @rule(agent=agents, verdict=st.sampled_from(Verdict))
    def judge(self, agent: str, verdict: Verdict) -> None:
        engine = self.engine(agent)
        self.watch.probe_ended(engine, agent, verdict, self.now)
        name, begun = self.started.get(engine, ("", 0.0))
        if name != agent:
            return
        del self.started[engine]
        if verdict.ended and begun > self.heard_at[agent]:
            self.proofs[agent].append((begun, self.now))
        else:
            self.proofs[agent] = []
        if verdict in (ALIVE, SPEAKS_LAYERPUSH) and agent in self.lost_since.keys() | self.cut_since.keys():
            self.reconnects.add(engine)
        if verdict is SPEAKS_LAYERPUSH and agent not in self.speaking:
            self.speaking.add(agent)
            self.unanswered.pop(agent, None)

    @rule(agent=agents)
    def kill(self, agent: str) -> None:
        """The signs of a real death."""
        for _ in range(4):
            self.lose(agent)
            self.act()
            self.judge(agent, ENDED)
            self.pass_time(0.5)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 0.5, 1.0, 2.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.act()

    @rule()
    def act(self) -> None:
        due = self.watch.next_due(self.now)
        orders = self.watch.due(self.now)
        assert (due is not None and due <= self.now) == bool(orders)
        for order in orders:
            self.log.append((self.now, order))
            self._check(order)

    def _forget(self, agent: str) -> None:
        self.proofs[agent] = []
        self.unanswered.pop(agent, None)
        self.lost_since.pop(agent, None)
        self.cut_since.pop(agent, None)
        self.gone.discard(agent)
        self.speaking.discard(agent)
        self.silent.discard(agent)
        engine = self.engine(agent)
        if not any(self.sessions[other] for other in "ABCD" if other != agent and self.engine(other) == engine):
            self.started.pop(engine, None)

    def _check(self, order: PeerAction) -> None:
        agent = getattr(order, "agent", None)
        if agent is not None:
            assert self.sessions[agent], f"{order} about an agent without a session"
        match order:
            case ReportGone():
                assert self.lost_since.get(agent) is not None or agent in self.gone
                first, *_, last = self.proofs[agent]
                assert last[0] >= first[1] + PROBE_GAP_S
                assert self.heard_at[agent] < first[0]
                self.gone.add(agent)
            case ReportSilent():
                assert agent in self.speaking
                assert agent not in self.gone | self.silent
                assert self.now >= self.unanswered[agent] + 0.75 * self.timeout_s
                self.silent.add(agent)
            case SendPing(_, _, speaks_layerpush):
                self.unanswered.setdefault(agent, self.now)
                assert speaks_layerpush == (agent in self.speaking)
                assert agent not in self.gone
            case Reconnect(engine, _):
                assert engine in self.reconnects
                self.reconnects.remove(engine)
            case StartProbe(engine):
                running = self.started.get(engine)
                assert running is None or not self.sessions[running[0]] or self.now >= running[1] + PROBE_LOST_S
                self.started[engine] = (agent, self.now)

    @invariant()
    def orders_come_slowly(self) -> None:
        recent = Counter(order for at, order in self.log if at > self.now - 1.0)
        assert all(count <= 4 + self.sessions.total() for count in recent.values()), recent

    @invariant()
    def nothing_is_kept(self) -> None:
        assert len(self.watch) == sum(count > 0 for count in self.sessions.values())
        if not len(self.watch):
            assert not any([self.watch._engines, self.watch._engine_of])


WatchMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestWatchMachine = WatchMachine.TestCase
