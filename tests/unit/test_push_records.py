"""The time at which a push met its registration, in either order."""

from __future__ import annotations

import time

from layerpush.telemetry.trace_records import PushRecord
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld
from tests.unit.test_writer import prompt_of


def ended(world: ScriptedWorld, prompt: ScriptedRequest) -> PushRecord:
    world.settle()
    world.finish(prompt)
    world.settle()
    (record,) = world.trace.records
    return record


def test_a_registration_before_prefill_is_recorded() -> None:
    world, prompt = ScriptedWorld(), prompt_of(tokens=8)
    world.registers(prompt, world.decoder())
    world.step((prompt, 8))
    record = ended(world, prompt)
    assert record.t_first_planned is not None
    assert record.t_registered is not None
    assert record.t_first_planned <= record.t_registered <= record.writes[0].t_post


def test_a_registration_during_prefill_is_recorded() -> None:
    world, prompt = ScriptedWorld(), prompt_of(tokens=16)
    wanted = world.asks(prompt, world.decoder())
    world.step((prompt, 8))
    before = time.perf_counter()
    world.send(wanted)
    after = time.perf_counter()
    world.step((prompt, 8))
    assert before <= (ended(world, prompt).t_registered or 0.0) <= after


def test_a_registration_after_prefill_is_recorded() -> None:
    world, prompt = ScriptedWorld(), prompt_of(tokens=8)
    wanted = world.asks(prompt, world.decoder())
    world.step((prompt, 8))
    world.finish(prompt)
    before = time.perf_counter()
    world.send(wanted)
    world.settle()
    (record,) = world.trace.records
    assert (record.mode, record.outcome) == ("request", "completed")
    assert before <= (record.t_registered or 0.0)


def test_a_push_without_a_registration_is_recorded() -> None:
    world, prompt = ScriptedWorld(), prompt_of(tokens=8)
    world.decoder()
    world.step((prompt, 8))
    world.abort(prompt)
    world.settle()
    (record,) = world.trace.records
    assert record.t_registered is None
