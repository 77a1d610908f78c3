"""Timing WRITEs to a decode engine: the learned costs, and the end when that engine dies, stops or goes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from layerpush.core.write import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import Route, TransportError, WriteState
from layerpush.transport.link import Link
from layerpush.transport.packing.calibration import BUDGET_S, QUIET_S, SCRATCH_PIECES, Calibration
from layerpush.transport.packing.cost_model import Costs
from layerpush.transport.packing.memory import PIECE_BYTES
from layerpush.transport.packing.packer import Packer
from layerpush.transport.packing.strategy import RETRY_S, PackingStrategy
from tests.support.fake_transport import FakeFabric, Faults
from tests.unit.builders import layout_of
from tests.unit.staging_rig import NumpyStaging

NEVER = 10**6
SIZE = SCRATCH_PIECES * PIECE_BYTES
RING = Route("D", 0, "pieces", "ring")


class Clock:
    """Each call takes a moment."""

    now = 100.0

    def perf_counter(self) -> float:
        self.now += 1e-4
        return self.now


class Pair:
    def __init__(self, faults: Faults | None = None) -> None:
        self.fabric = FakeFabric(faults)
        self.p, self.d = self.fabric.endpoint("P"), self.fabric.endpoint("D")
        starts = range(0, SIZE, PIECE_BYTES)
        layout = layout_of([0])
        staging = NumpyStaging(layout, np.zeros(64 * 32, np.uint8), SIZE)
        self.p.describe("pieces", staging.memory, starts, PIECE_BYTES)
        self.d.describe("ring", np.zeros(SIZE, np.uint8), starts, PIECE_BYTES)
        self.strategy = PackingStrategy(Packer(self.p, layout, staging, 32), layout, "auto", Costs())

    def calibration(self, now: float | None = None) -> Calibration:
        return Calibration(self.p, RING, Costs(), time.perf_counter() if now is None else now)

    def calibrates(self) -> None:
        self.strategy.calibrate("D", self.p, RING)

    def until_idle(self) -> None:
        self.strategy.turn()
        while self.strategy.is_busy:
            self.strategy.turn()


def until_over(calibration: Calibration) -> None:
    deadline = time.perf_counter() + 10 * BUDGET_S
    while not calibration.is_over and time.perf_counter() < deadline:
        calibration.turn()
    assert calibration.is_over


def test_a_frozen_engine_is_polled_once_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer goes on with everything else meanwhile."""
    pair = Pair()
    calibration = pair.calibration()
    calibration.turn()
    pair.fabric.freeze("D")
    deadline = time.perf_counter() + BUDGET_S
    while time.perf_counter() < deadline:
        calibration.turn()
    looks: list[object] = []
    poll = pair.p.poll
    monkeypatch.setattr(pair.p, "poll", lambda handle: looks.append(handle) or poll(handle))
    for _ in range(3):
        calibration.turn()
    assert len(looks) <= 3
    pair.fabric.thaw("D")
    until_over(calibration)
    assert not pair.p._live


@pytest.mark.parametrize("when", ["at once", "with a WRITE on the wire"])
def test_a_dead_engine_ends_the_calibration(when: str) -> None:
    pair = Pair(Faults(hold_writes={0: NEVER}))
    calibration = pair.calibration()
    if when != "at once":
        calibration.turn()
    pair.fabric.kill("D")
    until_over(calibration)
    assert calibration.costs is None
    assert not pair.p._live


def test_an_unexpected_transport_error_ends_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not end the writer's turn: every push would fail, turn after turn."""
    pair = Pair()
    pair.calibrates()

    def broken(*_: object) -> None:
        raise RuntimeError("no such list of descriptors")

    monkeypatch.setattr(pair.p, "post_write", broken)
    pair.strategy.turn()
    assert not pair.strategy.is_busy


def test_forgetting_an_engine_ends_its_calibration() -> None:
    pair = Pair(Faults(hold_writes={0: NEVER}))
    pair.calibrates()
    pair.strategy.turn()
    assert pair.strategy.engines_in_flight == {"D"}
    pair.strategy.forget("D")
    assert not pair.strategy.is_busy
    assert pair.strategy.engines_in_flight == set()
    assert not pair.p._live


def test_writes_go_directly_during_the_calibration() -> None:
    pair = Pair(Faults(hold_writes={0: NEVER}))
    pair.calibrates()
    pair.strategy.turn()
    ids, link = np.arange(0, 8000, 8, dtype=np.int32), Link("D", (RING,), (), gathered=RING)
    record = WriteRecord(0, (0, 0), (0, 0), 0, 0, 0.0, 0.0)
    assert pair.strategy.begin(Write(0, 0, 0, 1 << 20, ()), link, (ids, ids), record) is None
    assert (record.plan, record.estimate_s) == ("direct", None)


def test_a_failed_calibration_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed WRITE ends the first try."""
    pair, clock = Pair(), Clock()
    for module in ("calibration", "strategy"):
        monkeypatch.setattr(f"layerpush.transport.packing.{module}.time", clock)

    def fails(_: object) -> WriteState:
        raise TransportError("a WRITE ended in an error")

    with monkeypatch.context() as failing:
        failing.setattr(pair.p, "poll", fails)
        pair.calibrates()
        pair.until_idle()
    pair.strategy.turn()
    assert not pair.strategy.is_busy
    clock.now += RETRY_S
    pair.until_idle()
    assert pair.strategy.costs_to("D").scattered != Costs().scattered
    clock.now += 10 * RETRY_S
    pair.strategy.turn()
    assert not pair.strategy.is_busy, "known costs are not timed again"
    assert not pair.p._live


def test_the_calibration_proceeds_under_constant_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, clock = Pair(), Clock()
    monkeypatch.setattr("layerpush.transport.packing.calibration.time", clock)
    calibration = pair.calibration(clock.now)
    calibration.turn(quiet=False)
    assert not pair.fabric.writes
    clock.now += QUIET_S
    for _ in range(1000):
        calibration.turn(quiet=False)
    assert calibration.is_over
    assert calibration.costs is not None


def test_a_busy_writer_does_not_use_up_the_calibration_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("layerpush.transport.packing.calibration.time", clock)
    calibration = Pair().calibration(clock.now)
    clock.now += 3 * BUDGET_S
    while not calibration.is_over:
        calibration.turn()
    assert calibration.costs is not None
