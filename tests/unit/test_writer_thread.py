"""A turn of the writer thread touches only what is due, was woken for, or has a message."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from bench.rank import Rank
from layerpush.core.config import LayerPushConfig
from layerpush.core.layout import CacheLayout, LayerSlots, Region
from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import PromptProgress, StepPlan
from layerpush.core.wire import Ping, Registration, encode
from layerpush.decode.load_session import LoadSession
from layerpush.engine.worker.wake import Waker
from layerpush.engine.worker.writer_thread import IDLE_POLL_S, NOTIFICATION_POLL_S
from layerpush.prefill.push_session import PushSession
from layerpush.telemetry.metrics.loop_lag import LoopLag
from layerpush.telemetry.trace_file import TraceFile
from layerpush.transport.peers import Address, Handshake, Peers

WAITING, LAYERS, TOKENS, BLOCK_TOKENS = 50, 4, 1024, 16
P = Address("P", "127.0.0.1", 5600, 1)


class Quiet:
    """The worker and the network, in which nothing happens. One prefill engine is connected."""

    engine_id, world_size, tp_rank = "D", 1, 0

    def __init__(self) -> None:
        self.queued: deque[tuple[str, Any]] = deque()
        self.peers = Peers()
        self.peers["P"].handshake = Handshake(Future(), P)
        self.transport = self

    def __getattr__(self, name: str) -> Any:
        answers = {"agents_of": {"p-0": (0, 0)}, "engines": ["P"], "knows": True}
        empty = {"ended_requests": (), "deferred_pushes": ()}
        return lambda *_, **__: {**answers, **empty}.get(name)

    def notifications(self) -> list[tuple[str, bytes]]:
        return []

    def tasks(self) -> list[tuple[str, Any]]:
        return [self.queued.popleft() for _ in range(len(self.queued))]


class WaitingRank(Rank):
    """A rank without an engine. The main thread queues work for its writer. P's engine is always in use."""

    def __init__(self) -> None:
        quiet: Any = Quiet()
        self.queued, lag = quiet.queued, LoopLag()
        layers = [LayerSlots(f"layers.{layer}", 0, (layer,)) for layer in range(LAYERS)]
        layout = CacheLayout(tuple(layers), tuple(Region(layer << 30, 1 << 16, 4096) for layer in range(LAYERS)))
        super().__init__(quiet, layout, PushMode.LAYER, Waker(lag.woken), lag, TraceFile(None, "P", 0))

    @property
    def engines_in_use(self) -> set[str]:
        return {"P"}

    def waits(self, side: str) -> None:
        """On P, pushes whose prefill is over begin to wait for D's registration; on D, loads for P."""
        names = [f"r-{number}" for number in range(WAITING)]
        if side == "P":
            table = [list(range(1, 1 + TOKENS // BLOCK_TOKENS))]
            chunks = [PromptProgress(name, (BLOCK_TOKENS,)).advance(0, TOKENS, TOKENS, table) for name in names]
            self.steps.arm(StepPlan(tuple(chunk for chunk in chunks if chunk is not None)))
            self.steps.sweep()
            for name in names:
                self.steps.finish(name, tuple(table))
            return
        for name in names:
            wanted = Registration(
                request_id=name, decode_engine_id="D", decode_host="127.0.0.1", decode_port=5601,
                decode_tp_size=1, local_block_ids=(tuple(range(64)),), layerpush=1,
            )  # fmt: skip
            self.queued.append(("", lambda wanted=wanted: self.loads.register(wanted, P, {}, time.perf_counter())))


class Touched:
    """Notes each call of the writer's parts, and each session that somebody looks at."""

    def __init__(self, rank: WaitingRank, monkeypatch: pytest.MonkeyPatch) -> None:
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


def waiting(side: str) -> WaitingRank:
    rank = WaitingRank()
    rank.waits(side)
    rank.writer.turn(True)
    assert len(rank.loads) + len(rank.pushes) == WAITING
    assert rank.writer.notifications_s == NOTIFICATION_POLL_S
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
