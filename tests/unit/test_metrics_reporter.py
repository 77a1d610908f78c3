"""The times of a process's reports; between threads, no count is lost or reported twice."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from layerpush.engine.metric_sources import watch_rings
from layerpush.telemetry.metrics.catalog import (
    AWAITED_LOADS,
    DROPPED_MESSAGES,
    EXPOSED,
    LOADS,
    PUSHES,
    RING_BYTES,
    RING_USED_BYTES,
    WRITER_LAG,
)
from layerpush.telemetry.metrics.loop_lag import LoopLag
from layerpush.telemetry.metrics.reporter import REPORT_S, Reporter


def test_recorded_values_are_reported_once() -> None:
    reporter = Reporter("0")
    reporter.recorder.count(PUSHES, "failed")
    reporter.recorder.observe((EXPOSED, 0.2), (EXPOSED, 0.4))
    tally = reporter.take_delta(1.0)
    assert tally is not None
    assert (tally.counted(PUSHES, "failed"), tally.observed(EXPOSED).count) == (1, 2)
    assert reporter.take_delta(1.0) is None


def test_external_totals_are_reported_as_increments() -> None:
    reporter, totals = Reporter("0"), {"foreign_status": 2}
    reporter.total(DROPPED_MESSAGES, lambda: totals)
    reported = []
    for more in (0, 0, 3):
        totals["foreign_status"] += more
        tally = reporter.take_delta(1.0)
        reported.append(0 if tally is None else tally.counted(DROPPED_MESSAGES, "foreign_status"))
    assert reported == [2, 0, 3]


def test_a_level_is_reported_on_change_and_periodically() -> None:
    reporter, level = Reporter("0"), [0.0]
    reporter.level(AWAITED_LOADS, lambda: level[0])

    def reported(now: float) -> float | None:
        tally = reporter.take_delta(now)
        return None if tally is None else tally.highest(AWAITED_LOADS)

    assert reported(10.0) == 0.0
    assert reported(10.1) is None
    level[0] = 5.0
    assert reported(10.2) == 5.0
    assert reported(10.3) is None
    assert reported(10.2 + REPORT_S) == 5.0
    level[0] = 0.0
    assert reported(11.3) == 0.0


@dataclass
class Ring:
    capacity_bytes: int
    used_bytes: int


def test_staging_rings_of_a_worker_add_up_to_one_level() -> None:
    """Without a ring, both levels are 0."""
    reporter, rings = Reporter("0"), list[Ring]()
    watch_rings(reporter, rings)
    for now, known in enumerate([[], [Ring(64, 0)], [Ring(64, 16), Ring(32, 8)]]):
        rings[:] = known
        tally = reporter.take_delta(float(now * 10))
        assert tally is not None
        assert tally.gauges[RING_BYTES.key] == {"0": sum(ring.capacity_bytes for ring in known)}
        assert tally.gauges[RING_USED_BYTES.key] == {"0": sum(ring.used_bytes for ring in known)}


def test_every_report_has_every_level_and_the_lag() -> None:
    """A late front end, or a silent rank, leaves no gap."""
    reporter = Reporter("1")
    reporter.level(AWAITED_LOADS, lambda: 7.0)
    reporter.take_delta(0.0)
    reporter.lag.turn_began(0.0)
    reporter.lag.turn_ended(0.25, poll_timeout=1.0)
    reporter.recorder.count(LOADS, "loaded")
    tally = reporter.take_delta(0.5)
    assert tally is not None
    assert tally.gauges == {AWAITED_LOADS.key: {"1": 7.0}}
    assert (tally.observed(WRITER_LAG).count, tally.observed(WRITER_LAG).total) == (1, 0.25)


def test_concurrent_threads_lose_no_counts() -> None:
    reporter, per_thread, writers = Reporter("0"), 5000, 3
    taken = {"counted": 0, "observed": 0}

    def record() -> None:
        for _ in range(per_thread):
            reporter.recorder.count(PUSHES, "layerwise")
            reporter.recorder.observe((EXPOSED, 0.01))

    def take() -> None:
        tally = reporter.take_delta(0.0)
        if tally is not None:
            taken["counted"] += tally.counted(PUSHES)
            taken["observed"] += tally.observed(EXPOSED).count

    threads = [threading.Thread(target=record) for _ in range(writers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        take()
    take()
    assert taken == {"counted": writers * per_thread, "observed": writers * per_thread}


@pytest.mark.parametrize(
    ("moves", "expected_s"),
    [
        pytest.param("take@0", [None], id="before the first turn"),
        pytest.param(
            "began@1 ended+.05@1.002 began@1.01 ended+.05@1.015 take@1.02 take@1.03", [0.005, 0], id="in time"
        ),
        pytest.param("began@1 ended+.1@1 began@1.4 ended+.1@1.5 take@1.5", [0.4], id="overslept"),
        pytest.param(
            "began@1 ended+5@1 woken@2 woken@2.3 take@2.1 began@2.5 ended+5@2.6 take@2.6 began@3 ended+5@3 take@3",
            [0.1, 0.6, 0],
            id="late after the first wake, once",
        ),
        pytest.param("began@1 woken@1.1 ended+5@1.5 began@1.5 ended+5@1.7 take@1.7", [0.6], id="work during a turn"),
        pytest.param("began@1 ended+.5@1 take@1.4 take@3.5 take@4.5", [0, 2, 3], id="never wakes again"),
        pytest.param("began@1 take@6 take@9 ended+.1@9.5 take@9.5", [5, 8, 8.5], id="a turn without end"),
    ],
)
def test_the_lag_is_the_length_of_a_turn_and_its_delay(moves: str, expected_s: list[float | None]) -> None:
    lag, taken = LoopLag(), list[float | None]()
    for move in moves.split():
        name, at = move.split("@")
        now = float(at)
        if name.startswith("ended+"):
            lag.turn_ended(now, poll_timeout=float(name.removeprefix("ended+")))
        elif name == "take":
            taken.append(lag.take_worst(now))
        elif name == "woken":
            lag.woken(now)
        else:
            lag.turn_began(now)
    assert taken == pytest.approx(expected_s)
