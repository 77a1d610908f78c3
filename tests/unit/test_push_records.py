"""The time at which a push met its registration, in either order."""

from __future__ import annotations

import time

from layerpush.telemetry.trace_records import PushRecord
from tests.unit.test_writer import prompt_of
from tests.unit.writer_rig import Prompt, Rig


def ended(rig: Rig, prompt: Prompt) -> PushRecord:
    rig.settle()
    rig.finish(prompt)
    rig.settle()
    (record,) = rig.trace.records
    return record


def test_a_registration_before_prefill_is_recorded() -> None:
    rig, prompt = Rig(), prompt_of(tokens=8)
    rig.host.pending[prompt.name] = rig.asks(prompt, rig.decoder())
    rig.step((prompt, 8))
    record = ended(rig, prompt)
    assert record.t_first_planned is not None
    assert record.t_registered is not None
    assert record.t_first_planned <= record.t_registered <= record.writes[0].t_post


def test_a_registration_during_prefill_is_recorded() -> None:
    rig, prompt = Rig(), prompt_of(tokens=16)
    wanted = rig.asks(prompt, rig.decoder())
    rig.step((prompt, 8))
    before = time.perf_counter()
    rig.writer.register(prompt.name, wanted)
    after = time.perf_counter()
    rig.step((prompt, 8))
    assert before <= (ended(rig, prompt).t_registered or 0.0) <= after


def test_a_registration_after_prefill_is_recorded() -> None:
    rig, prompt = Rig(), prompt_of(tokens=8)
    wanted = rig.asks(prompt, rig.decoder())
    rig.step((prompt, 8))
    rig.finish(prompt)
    before = time.perf_counter()
    rig.writer.register(prompt.name, wanted)
    rig.settle()
    (record,) = rig.trace.records
    assert (record.mode, record.outcome) == ("request", "completed")
    assert before <= (record.t_registered or 0.0)


def test_a_registration_found_at_the_end_of_prefill_is_recorded() -> None:
    rig, prompt = Rig(), prompt_of(tokens=8)
    wanted = rig.asks(prompt, rig.decoder())
    rig.step((prompt, 8))
    rig.host.pending[prompt.name] = wanted
    rig.finish(prompt)
    rig.settle()
    (record,) = rig.trace.records
    assert record.t_registered is not None


def test_a_push_without_a_registration_is_recorded() -> None:
    rig, prompt = Rig(), prompt_of(tokens=8)
    rig.decoder()
    rig.step((prompt, 8))
    rig.abort(prompt)
    rig.settle()
    (record,) = rig.trace.records
    assert record.t_registered is None
