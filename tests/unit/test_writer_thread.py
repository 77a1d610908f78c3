"""A turn of the writer thread touches only what is due, was woken for, or has a message."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from bench.waiting import WaitingRank as Rank
from layerpush.core.config import LayerPushConfig
from layerpush.core.wire import Ping, encode
from layerpush.decode.load_session import LoadSession
from layerpush.engine.worker import writer_thread
from layerpush.engine.worker.writer_thread import IDLE_POLL_S, LONGEST_POLL_S, NOTIFICATION_POLL_S
from layerpush.prefill.push_session import PushSession

WAITING = 50


class Touched:
    """Notes each call of the writer's parts, and each session that somebody looks at."""

    def __init__(self, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.sessions: list[str] = []
        writer = rank.writer
        for part in (*writer._timed, writer._pushes):
            for name in ("tick", "turn", "next_due"):
                if hasattr(part, name):
                    noted = self._noted(f"{type(part).__name__}.{name}", getattr(part, name))
                    monkeypatch.setattr(part, name, noted)
        sessions = [load.session for load in rank.loads._open.values()]
        pushes = [push.session for push in rank.pushes._pushes.values()]
        for kind, each in ((LoadSession, sessions), (PushSession, pushes)):
            watched = self._watched(kind)
            for session in each:
                monkeypatch.setattr(session, "__class__", watched)

    def _noted(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.calls.append(what)
            return call(*args)

        return noted

    def _watched(self, kind: type[Any]) -> type[Any]:
        touched = self.sessions

        class Watched(kind):
            def __getattribute__(self, name: str) -> Any:
                touched.append(name)
                return super().__getattribute__(name)

        return Watched


def waiting(side: str) -> Rank:
    rank = Rank()
    rank.waits(side, WAITING)
    rank.writer.turn(True)
    assert len(rank.loads) + len(rank.pushes) == WAITING
    assert rank.writer.poll_s(time.perf_counter()) == NOTIFICATION_POLL_S
    return rank


@pytest.mark.parametrize("side", ["D", "P"])
def test_a_poll_that_finds_nothing_touches_nothing(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = waiting(side)
    rank.writer._due = time.perf_counter() + 60.0
    touched = Touched(rank, monkeypatch)
    for _ in range(20):
        rank.writer.turn(False)
    assert (touched.calls, touched.sessions) == ([], [])


@pytest.mark.parametrize("reason", ["woken", "due", "a message"])
@pytest.mark.parametrize("side", ["D", "P"])
def test_a_full_turn_looks_at_no_request_that_only_waits(
    side: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = waiting(side)
    rank.writer._due = 0.0 if reason == "due" else time.perf_counter() + 60.0
    touched = Touched(rank, monkeypatch)
    message = [("p-9", encode(Ping("E", 1)))] if reason == "a message" else []
    monkeypatch.setattr(rank.writer._inbox, "_notifications", lambda: message)
    rank.writer.turn(reason == "woken")
    assert "Pushes.turn" in touched.calls
    assert {call.split(".")[0] for call in touched.calls if call.endswith("tick")} == {
        "Connections",
        "Claims",
        "Loads",
        "IdleConnections",
    }
    assert touched.sessions == []


@pytest.mark.parametrize("news", ["a message", "another load", "a load less"])
def test_the_longer_nothing_comes_the_less_often_the_writer_asks(news: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = waiting("D")
    writer, since = rank.writer, time.perf_counter()
    asks = [writer.poll_s(since + waited_s) for waited_s in (0.01, 0.3, 60.0)]
    assert asks == pytest.approx([NOTIFICATION_POLL_S, 3e-3, LONGEST_POLL_S], rel=0.1)
    later = since + 60.0
    monkeypatch.setattr(time, "perf_counter", lambda: later)
    writer.turn(True)
    assert writer.poll_s(later) == LONGEST_POLL_S, "an engine that decodes wakes the writer in every step"
    if news == "a message":
        monkeypatch.setattr(writer._inbox, "_notifications", lambda: [("p-9", encode(Ping("E", 1)))])
    elif news == "another load":
        rank.waits("D", WAITING + 1)
    else:
        rank.loads._open.popitem()
    writer.turn(True)
    assert writer.poll_s(later) == NOTIFICATION_POLL_S


def test_an_idle_writer_asks_seldom() -> None:
    rank = Rank()
    rank.writer.turn(True)
    assert rank.writer.poll_s(time.perf_counter()) == IDLE_POLL_S


def test_the_next_turn_is_due_when_the_first_part_is() -> None:
    rank = waiting("D")
    now = time.perf_counter()
    load = next(iter(rank.loads._open))
    assert rank.writer._due <= now + IDLE_POLL_S
    beat_s = LayerPushConfig().peer_timeout_s / 4
    assert rank.loads.next_due(now) == pytest.approx(now + beat_s, abs=1.0), "the first ping"
    rank.loads._deadlines.set(load, now + 20e-3)
    assert rank.writer._next_due(now) == now + 20e-3
    rank.loads._deadlines.set(load, None)
    assert rank.writer._next_due(now) > now + IDLE_POLL_S


def test_the_writer_outlives_failed_turns_whatever_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, turns = waiting("P"), list[float]()

    def fail() -> None:
        turns.append(time.perf_counter())
        if len(turns) == 3:
            rank.writer._stop.set()
        raise MemoryError

    monkeypatch.setattr(rank.pushes, "turn", fail)
    monkeypatch.setattr(rank.pushes, "fail_all", Mock(side_effect=MemoryError))
    rank.writer.run()
    assert len(turns) == 3


def test_a_push_that_cannot_fail_does_not_save_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = waiting("P")
    first = next(iter(rank.pushes._pushes.values()))
    monkeypatch.setattr(first, "fail", Mock(side_effect=MemoryError))
    rank.pushes.fail_all("broken")
    assert len(rank.pushes) == 1


def test_turns_that_fail_for_a_second_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests would wait without end. The thread's end ends the engine."""
    monkeypatch.setattr(writer_thread, "FAILING_S", 0.05)
    rank = waiting("D")
    monkeypatch.setattr(rank.loads, "tick", Mock(side_effect=ZeroDivisionError))
    rank.writer._failing_since = 0.0
    with monkeypatch.context() as sound:
        sound.setattr(rank.loads, "tick", lambda _: None)
        rank.writer.turn(True)
    assert rank.writer._failing_since is None, "one good turn is enough"
    with pytest.raises(ZeroDivisionError):
        rank.writer.run()


def test_a_turn_that_fails_does_not_come_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, turns = waiting("P"), list[float]()

    def fail() -> None:
        turns.append(time.perf_counter())
        if len(turns) == 3:
            rank.writer._stop.set()
        raise RuntimeError("broken")

    monkeypatch.setattr(rank.pushes, "turn", fail)
    rank.writer._due = 0.0
    rank.waker.clear()
    rank.writer.run()
    assert min(later - earlier for earlier, later in itertools.pairwise(turns)) >= NOTIFICATION_POLL_S / 2
