"""The soak's reaction to dead and silent engines, and to requests that never end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.e2e.results import Finished
from tests.faults.soak.engine import Ended
from tests.faults.soak.engine_slots import EngineSlot
from tests.faults.soak.kinds import BY_NAME
from tests.faults.soak.plan import PlannedFault
from tests.faults.soak.settings import Settings
from tests.faults.soak.soak import HANG_S, SILENCE_S, NotStartedError, ReferenceLostError, Soak
from tests.faults.soak.tally import Tally
from tests.unit.soak_stubs import LATER, FakeSlots


class EventfulSlots(FakeSlots):
    """Events happen when the test says so."""

    def __init__(self) -> None:
        super().__init__("P1", "D1", "R")
        self.happening: list[tuple[EngineSlot, Any]] = []

    def wait(self, timeout: float) -> list[tuple[EngineSlot, Any]]:
        happened, self.happening = self.happening, []
        return happened

    def measure_memory(self, *, idle: bool = False) -> None:
        pass


class Rig:
    def __init__(self) -> None:
        self.slots, self.tally = EventfulSlots(), Tally()
        self.soak = Soak(Settings(1.0, 0, ()), self.slots, self.tally, lambda phase: None)
        self.tally.begin_turn("plain", reads_kv=True)
        self.tally.begin_round()

    def turn(self, *events: tuple[str, Any]) -> None:
        self.slots.happening = [(self.slots[name], event) for name, event in events]
        self.soak._turn("test")

    def ills(self) -> list[str]:
        return [problem.ill for problem in self.tally.problems]

    def signals(self, name: str) -> list[str]:
        return self.slots[name].engine.signals


def test_an_unexpected_engine_death_is_a_problem_and_is_replaced():
    rig = Rig()
    rig.turn(("D1", Ended("Traceback: KeyError")))
    assert rig.ills() == ["death"]
    assert "KeyError" in rig.tally.problems[0].text
    rig.soak._schedule.run_due(LATER)
    assert rig.slots.replaced == [("D1", True, True)]


def test_an_intended_engine_death_is_no_problem():
    rig = Rig()
    rig.soak._engine_faults.leave(rig.slots["P1"])
    rig.turn(("P1", Ended(None)))
    assert rig.ills() == []


def test_an_unresponsive_engine_counts_as_a_hang_and_is_killed():
    rig = Rig()
    rig.slots["P1"].engine.waiting_since = time.monotonic() - SILENCE_S - 1
    rig.turn()
    assert rig.ills() == ["hang"]
    assert rig.signals("P1") == ["stacks", "kill"]
    rig.turn()
    assert rig.ills() == ["hang"], "the hang is noticed once"


def test_a_stopped_engine_does_not_count_as_a_hang():
    rig = Rig()
    rig.slots["P1"].engine.waiting_since = time.monotonic() - SILENCE_S - 1
    rig.slots["P1"].engine.paused = True
    rig.turn()
    assert rig.ills() == []


def test_an_endless_request_counts_as_a_hang_and_is_given_up():
    rig = Rig()
    rig.soak._top_up()
    [request] = rig.soak.traffic.live.values()
    rig.turn()
    assert rig.ills() == []
    request.sent_at -= HANG_S + 1
    rig.turn()
    assert rig.ills() == ["hang"]
    assert request.request_id in rig.tally.problems[0].text
    assert rig.soak.traffic.live == {}
    assert rig.signals("P1") == rig.signals("D1") == ["stacks"]


def test_a_request_that_ends_is_accounted_for():
    rig = Rig()
    rig.soak._top_up()
    [request] = rig.soak.traffic.live.values()
    for leg, name in ((request.p, "P1"), (request.d, "D1")):
        rig.soak._schedule.run_due(LATER)
        tokens = tuple(range(leg.max_tokens))
        rig.turn((name, Finished(request.request_id, tokens, None, "length")))
    question = rig.slots["R"].engine.added[-1]
    rig.turn(("R", Finished(question.request_id, tuple(range(question.max_tokens)), None, "length")))
    assert rig.tally.requests == 1
    assert rig.tally.problems == []
    assert rig.soak._is_calm()


def test_requests_in_flight_do_not_exceed_their_limit():
    rig = Rig()
    for _ in range(50):
        rig.soak._top_up()
    assert len(rig.soak.traffic.live) == rig.soak._settings.in_flight


def test_the_soak_is_not_calm_during_a_fault():
    rig = Rig()
    assert rig.soak._is_calm()
    rig.soak._engine_faults._outlast(1.0, lambda: None)
    assert not rig.soak._is_calm()
    rig.soak._schedule.run_due(LATER)
    assert rig.soak._is_calm()
    rig.slots["D1"].engine.paused = True
    assert not rig.soak._is_calm()


def test_without_the_plain_engine_the_soak_ends():
    rig = Rig()
    with pytest.raises(ReferenceLostError):
        rig.turn(("R", Ended("Traceback")))


def test_a_failed_engine_start_ends_the_soak():
    rig = Rig()
    rig.slots["P1"].engine.ready = False
    rig.slots.happening = [(rig.slots["P1"], Ended("Traceback: no such model"))]
    with pytest.raises(NotStartedError, match=r"P1 did not start:\nTraceback: no such model"):
        rig.soak.start()


def test_a_fault_after_the_end_of_the_load_is_skipped():
    rig = Rig()
    rig.soak.stop()
    rig.soak._strike(PlannedFault(BY_NAME["kill-p"], 0.0, 0.5), LATER)
    assert rig.tally.skipped == {"kill-p": 1}
