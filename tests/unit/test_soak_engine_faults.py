"""The start and the end of faults of engines and wires."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from layerpush.core import wire
from tests.e2e import wirefaults
from tests.faults.soak import noise
from tests.faults.soak.counting import Counting
from tests.faults.soak.engine_faults import EngineFaults
from tests.faults.soak.kinds import BY_NAME, KINDS
from tests.faults.soak.plan import PlannedFault
from tests.faults.soak.schedule import Schedule
from tests.faults.soak.scripted import arm_posts, garbage, throw_garbage
from tests.unit.soak_stubs import LATER, FakeSlots


class Rig:
    def __init__(self) -> None:
        self.slots, self.schedule = FakeSlots("P1", "P2", "D1", "D2"), Schedule()
        self.struck: list[str] = []
        self.skipped: list[str] = []
        self.idle: set[str] = set()
        self.bursts: list[int] = []
        self.stuck: list[str] = []
        self.engine_faults = EngineFaults(
            self.slots,
            self.schedule,
            self.struck.append,
            self.skipped.append,
            lambda slot: slot.name not in self.idle,
            self.bursts.append,
            lambda slot, _: self.stuck.append(slot.name),
        )

    def strike(self, name: str, draw: float = 0.5, until: float = LATER) -> None:
        self.engine_faults.strike(PlannedFault(BY_NAME[name], 0.0, draw), until)

    def signals(self) -> dict[str, list[str]]:
        return {name: slot.engine.signals for name, slot in self.slots.slots.items() if slot.engine.signals}

    def calls(self) -> list[object]:
        return [function for slot in self.slots.slots.values() for function, _ in slot.engine.called]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.place != "request"], ids=lambda kind: kind.name)
def test_every_kind_acts_on_the_side_in_its_name(kind, monkeypatch: pytest.MonkeyPatch):
    visits: list[int] = []
    monkeypatch.setattr(noise, "send_noise", lambda host, port, rng: visits.append(port))
    rig = Rig()
    rig.strike(kind.name)
    touched = {name[0] for name, slot in rig.slots.slots.items() if slot.engine.signals or slot.engine.called}
    assert touched or rig.bursts or visits
    assert kind.side is None or touched <= {kind.side}
    assert rig.struck == [kind.name]


@pytest.mark.parametrize(
    ("name", "same_id", "same_port"), [("kill-p", True, True), ("kill-d-new", False, False), ("move-d", True, False)]
)
def test_a_killed_engine_comes_back(name: str, same_id: bool, same_port: bool):
    rig = Rig()
    rig.strike(name)
    [(killed, signals)] = rig.signals().items()
    assert signals == ["kill"]
    assert rig.slots[killed].leaving
    rig.engine_faults.ended(rig.slots[killed])
    assert rig.engine_faults.outstanding == 1
    rig.schedule.run_due(LATER)
    assert rig.slots.replaced == [(killed, same_id, same_port)]
    assert rig.engine_faults.outstanding == 0


def test_a_stopped_engine_continues_later():
    rig = Rig()
    rig.strike("stop-d")
    assert rig.engine_faults.outstanding == 1
    rig.schedule.run_due(LATER)
    assert list(rig.signals().values()) == [["pause", "resume"]]


@pytest.mark.parametrize("name", ["shutdown-p", "writer-d"])
def test_an_engine_that_does_not_end_is_reported(name: str):
    rig = Rig()
    rig.strike(name)
    rig.schedule.run_due(LATER)
    assert len(rig.stuck) == 1


def test_held_writes_are_released_later():
    rig = Rig()
    rig.strike("stuck-handle")
    assert rig.calls() == [arm_posts]
    rig.schedule.run_due(LATER)
    assert rig.calls() == [arm_posts, wirefaults.lift]


def test_a_fault_is_not_lifted_on_a_restarted_engine():
    rig = Rig()
    rig.strike("stuck-handle")
    for slot in rig.slots.slots.values():
        slot.incarnation += 1
    rig.schedule.run_due(LATER)
    assert rig.calls() == [arm_posts]


def test_one_engine_of_a_side_is_disturbed_at_a_time():
    rig = Rig()
    rig.strike("kill-p")
    rig.strike("stop-p")
    rig.strike("garbage-notes", draw=0.5)
    assert rig.struck == ["kill-p", "garbage-notes"]
    assert throw_garbage in rig.calls()
    for slot in rig.slots.slots.values():
        slot.leaving, slot.engine.ready = False, True
    rig.schedule.run_due(LATER)
    assert rig.struck[-1] == "stop-p"


def test_idle_engines_are_not_killed():
    rig = Rig()
    rig.idle = {"P1", "P2"}
    rig.strike("kill-p")
    assert rig.struck == []
    rig.idle = set()
    rig.schedule.run_due(LATER)
    assert rig.struck == ["kill-p"]


def test_a_fault_without_a_target_in_time_counts_as_skipped():
    rig = Rig()
    for slot in rig.slots.slots.values():
        slot.engine.ready = False
    rig.strike("kill-p", until=0.0)
    assert (rig.struck, rig.skipped) == ([], ["kill-p"])


def test_garbage_is_distinguished_from_messages():
    """No garbage may be an order about an existing request."""
    rng, kinds = random.Random(0), set()
    for _ in range(500):
        try:
            message = wire.read(garbage(rng))
        except wire.WireError:
            kinds.add("refused")
        else:
            kinds.add(type(message).__name__)
            assert "soak-" not in str(message)
    assert "refused" in kinds
    assert kinds <= {"refused", "Heartbeat", "Completion"}


def test_counts_add_up_over_the_processes_of_an_engine():
    slots = FakeSlots("P1", "D1", "R")
    totals: Counter[str] = Counter()
    counting, answers = Counting(slots, totals), {"P1": {"err-handle": 2}, "D1": {}}

    def ask() -> None:
        counting.advance(LATER)
        counting._next_at = 0.0

    for name in ("P1", "D1"):
        slots[name].engine.answers = answers[name]
    ask()
    answers["P1"]["err-handle"] = 5
    ask()
    slots["P1"].incarnation = 2
    answers["P1"]["err-handle"] = 1
    ask()
    assert totals == {"err-handle": 6}
    assert slots["R"].engine.called == []
