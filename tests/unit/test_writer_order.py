"""The writer may be busy for a whole step: later orders of the scheduler must not overtake the step itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from layerpush.core.step_plan import ChunkPlan, StepPlan
from layerpush.core.wire import Registration
from layerpush.telemetry.metrics.catalog import REWOUND_PUSHES
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.recorder import Recorder
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld
from tests.unit.test_step_events import SlowDevice

TOKENS = 22


def unseen_step(world: ScriptedWorld, prompt: ScriptedRequest, tokens: int = TOKENS) -> None:
    """A whole engine step while the writer is inside a long call."""
    world.arm(prompt, tokens)
    for layer in range(world.layers):
        world.capture.layer_saved(f"layers.{layer}")
    world.capture.sweep()


def unregistered() -> tuple[ScriptedWorld, ScriptedRequest]:
    world = ScriptedWorld()
    world.decoder()
    return world, ScriptedRequest("p-1", TOKENS, list(range(1, 9)))


def registered() -> tuple[ScriptedWorld, ScriptedRequest, Registration]:
    """A prompt that its decode engine D registered first."""
    world, prompt = unregistered()
    return world, prompt, world.registers(prompt)


@pytest.mark.parametrize("first_tokens", [TOKENS, 9], ids=["one chunk", "the last of two chunks"])
def test_a_finish_does_not_overtake_its_own_step(first_tokens: int) -> None:
    world, prompt, wanted = registered()
    if first_tokens < TOKENS:
        world.step((prompt, first_tokens))
    unseen_step(world, prompt)
    world.finish(prompt)
    world.settle()
    assert world.d.holds(prompt, wanted)
    assert world.rank.released == ["p-1"]
    assert [(record.outcome, record.mode) for record in world.trace.records] == [("completed", "layer")]
    world.assert_clean()


def test_a_request_with_an_unended_last_step_is_sent_at_the_next_step() -> None:
    """All ranks of a pipeline but the last see this in vLLM's V1 runner with a drafter."""
    world, prompt, wanted = registered()
    world.arm(prompt, TOKENS)
    world.finish(prompt)
    world.settle()
    assert world.rank.released == []
    world.capture.arm(StepPlan())
    world.settle()
    assert world.rank.released == ["p-1"]
    assert world.d.holds(prompt, wanted)
    world.assert_clean()


@pytest.mark.parametrize("wait", [False, True], ids=["in the queue", "behind a fence"])
@pytest.mark.parametrize("seen", [False, True], ids=["abort first", "step first"])
def test_an_abort_does_not_overtake_its_own_step(wait: bool, seen: bool) -> None:
    """Else the step would reopen a push that never ends, and complete it over blocks that P has given away."""
    world, prompt, _ = registered()
    device = SlowDevice(done=not wait)
    world.capture._fences = device
    unseen_step(world, ScriptedRequest("p-2", TOKENS, list(range(20, 28))))
    unseen_step(world, prompt)
    if seen:
        world.turn()
    world.abort(prompt)
    if not seen:
        world.turn()
    device.done = True
    world.settle()

    assert world.d.received() == [[]]
    assert "p-1" not in world.writer
    assert not world.p._live


@pytest.mark.parametrize("seen", [False, True], ids=["abort first", "step first"])
def test_an_aborted_push_counts_once_before_and_after_its_step(seen: bool) -> None:
    world, prompt = unregistered()
    unseen_step(world, prompt)
    if seen:
        world.turn()
    world.abort(prompt)
    world.settle()
    assert [record.outcome for record in world.trace.records] == ["cancelled"]
    assert world.rank.endings == {"p-1": ["aborted"]}
    world.assert_clean()


@pytest.mark.parametrize("reads", [1, 2, 3])
def test_an_aborted_push_counts_once_while_its_step_begins(reads: int) -> None:
    """The main thread aborts the request when the writer has begun to read its chunk."""
    world, prompt = unregistered()
    done: list[str] = []

    class Chunk(ChunkPlan):
        def __getattribute__(self, name: str) -> Any:
            if name == "request_id" and armed and not world.capture._void_lock.locked():
                done.append(name)
                if len(done) == reads:
                    world.abort(prompt)
            return super().__getattribute__(name)

    armed = False
    plan = prompt.chunk(TOKENS)
    world.capture.arm(StepPlan((Chunk(*(getattr(plan, each.name) for each in fields(plan))),)))
    world.capture.sweep()
    armed = True
    world.settle()
    assert len(done) >= reads
    assert [record.outcome for record in world.trace.records] == ["cancelled"]
    assert world.rank.endings == {"p-1": ["aborted"]}
    world.assert_clean()


def test_a_prompt_repeated_in_the_step_of_its_abort_is_pushed() -> None:
    world, prompt, wanted = registered()
    unseen_step(world, prompt, 9)
    again = ScriptedRequest("p-1", TOKENS, list(range(30, 38)))
    world.engine.drop(prompt)
    world.arm(again, TOKENS, aborted=["p-1"])
    world.capture.sweep()
    world.settle()
    if world.rank.failures:
        world.d.hand_out(wanted, again.name)
        world.send(wanted)
        world.settle()

    world.assert_delivered(again, wanted)


@pytest.mark.parametrize("wait", [False, True], ids=["in the queue", "behind a fence"])
def test_layers_queued_before_a_preemption_are_not_sent(wait: bool) -> None:
    world, prompt, wanted = registered()
    device = SlowDevice(done=not wait)
    world.capture._fences = device
    unseen_step(world, prompt, 9)
    for first in (20, 40):
        world.preempt(prompt, list(range(first, first + 8)))
        world.arm(prompt, 12, preempted=("p-1",))
        world.capture.sweep()
    world.turn()
    device.done = True
    world.settle()
    unseen_step(world, prompt, TOKENS)
    world.settle()

    world.assert_delivered(prompt, wanted)


@pytest.mark.parametrize("how", ["aborted", "preempted", "expired"])
def test_blocks_revoked_during_the_last_write_get_no_completion(how: str) -> None:
    """The completion is checked against the scheduler's newest orders, not against the last turn's."""
    world, prompt, wanted = registered()
    world.fabric.faults.hold_writes = dict.fromkeys(range(world.layers), 8)
    world.step((prompt, TOKENS))
    if how == "expired":
        world.finish(prompt)
    assert world.writer.writes_in_flight("p-1")
    world.writer._take_step_events()  # this turn has read its events when the scheduler takes the blocks away
    if how == "aborted":
        world.abort(prompt)
    elif how == "expired":
        world.expire(prompt)
    else:
        world.preempt(prompt, list(range(30, 38)))
        world.arm(prompt, TOKENS, preempted=("p-1",))
    for _ in range(30):
        world.writer._poll()
    assert world.d.received() == [[]]
    if how != "preempted":
        world.settle()
        reason = "aborted" if how == "aborted" else "its lease ran out"
        assert world.reported_failures() == [(reason, True, False)]
        world.assert_clean()
        return
    world.capture.sweep()
    world.settle()
    world.assert_delivered(prompt, wanted)


def test_a_finish_after_the_end_of_its_lease_starts_no_push() -> None:
    world, prompt = unregistered()
    world.step((prompt, TOKENS))
    world.end(prompt)
    world.expire(prompt)
    world.settle()
    assert not world.fabric.writes
    assert world.rank.released == []
    world.assert_clean()


def test_a_request_ends_if_its_lease_expires_before_its_first_event() -> None:
    """As in an engine that was stopped for a while."""
    world, prompt, _ = registered()
    unseen_step(world, prompt)
    world.end(prompt)
    world.expire(prompt)
    world.settle()
    assert world.rank.endings == {"p-1": ["its lease ran out"]}
    assert world.d.received() == [[]]


def test_a_repeated_prompt_without_plans_finishes_after_an_abort() -> None:
    """The prompt is too short for a plan. Another request's fence holds the queue, so no void step is forgotten."""
    world, prompt, _ = registered()
    device = SlowDevice()
    world.capture._fences = device
    unseen_step(world, ScriptedRequest("p-2", TOKENS, list(range(20, 28))))
    world.abort(prompt)
    world.turn()
    world.capture.arm(StepPlan())
    world.end(prompt)
    world.settle()
    assert world.rank.released == ["p-1"]


@pytest.mark.parametrize("word", ["accepted", "finished"])
def test_a_completion_waits_for_the_schedulers_word(word: str) -> None:
    world, prompt = ScriptedWorld(), ScriptedRequest("p-1", TOKENS, list(range(1, 9)), provisional=True)
    wanted = world.registers(prompt)
    world.step((prompt, TOKENS))
    world.settle()
    assert world.d.holds(prompt, wanted)
    assert world.d.received() == [[]]
    (world.accept if word == "accepted" else world.finish)(prompt)
    world.settle()
    world.assert_delivered(prompt, wanted)


def test_a_completion_waits_for_nothing_without_another_connector() -> None:
    """It leaves in the turn that sees the last WRITE land; neither the next step nor the request's end is needed."""
    world, prompt, wanted = registered()
    world.step((prompt, TOKENS))
    while world.writer.writes_in_flight("p-1"):
        assert world.d.received() == [[]]
        world.turn()
    world.assert_delivered(prompt, wanted)


def test_a_step_taken_back_before_its_word_is_seen_is_not_accepted() -> None:
    world, prompt = ScriptedWorld(), ScriptedRequest("p-1", TOKENS, list(range(1, 9)), provisional=True)
    world.registers(prompt)
    world.step((prompt, TOKENS))
    world.settle()
    world.capture.arm(StepPlan(accepted=("p-1",)))
    world.capture.revoke(rewound=("p-1",))
    world.settle()
    assert world.d.received() == [[]]


@pytest.mark.parametrize("how", ["rewound", "preempted"])
def test_a_step_taken_back_after_the_completion_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A preemption is no error: the same tokens are computed again."""
    recorder = Recorder()
    world, prompt = ScriptedWorld(meter=PushMeter(recorder)), ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
    wanted = world.registers(prompt)
    world.step((prompt, TOKENS))
    world.settle()
    world.assert_delivered(prompt, wanted)
    if how == "rewound":
        prompt.computed = 4
        plan = StepPlan((prompt.chunk(TOKENS),), rewound=("p-1",))
    else:
        world.preempt(prompt, list(range(30, 38)))
        plan = StepPlan((prompt.chunk(TOKENS),), ("p-1",))
    world.capture.arm(plan)
    world.capture.sweep()
    world.settle()
    assert recorder.take_delta().counted(REWOUND_PUSHES) == (how == "rewound")
    assert ("vLLM has taken back a step after its completion" in caplog.text) == (how == "rewound")
    assert world.d.received() == [[]]
    world.finish(prompt)
    world.settle()
    world.assert_clean()
