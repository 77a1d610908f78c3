"""The writer may be busy for a whole step: later orders of the scheduler must not overtake the step itself."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from layerpush.core.step_plan import ChunkPlan, StepPlan
from layerpush.prefill.push_protocol import State
from layerpush.telemetry.metrics.catalog import REWOUND_PUSHES
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.recorder import Recorder
from tests.unit.writer_rig import Prompt, Rig

TOKENS = 22


@dataclass
class SlowFence:
    device: SlowDevice

    def passed(self) -> bool:
        return self.device.done

    def recycle(self) -> None:
        pass


@dataclass
class SlowDevice:
    """Computes when the test says so."""

    done: bool = False
    recorded: list[SlowFence] = field(default_factory=list)

    def record(self) -> SlowFence:
        self.recorded.append(SlowFence(self))
        return self.recorded[-1]


def unseen_step(rig: Rig, prompt: Prompt, tokens: int = TOKENS) -> None:
    """A whole engine step while the writer is inside a long call."""
    chunk = prompt.chunk(tokens)
    rig.capture.arm(StepPlan((chunk,)))
    rig.compute(prompt, chunk)
    for layer in range(rig.layers):
        rig.capture.layer_saved(f"layers.{layer}")
    rig.capture.sweep()


def rig_of() -> tuple[Rig, Prompt]:
    rig, prompt = Rig(), Prompt("p-1", TOKENS, list(range(1, 9)))
    rig.registers(prompt)
    return rig, prompt


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("first_tokens", [TOKENS, 9], ids=["one chunk", "the last of two chunks"])
def test_a_finish_does_not_overtake_its_own_step(registered: bool, first_tokens: int) -> None:
    rig, prompt = rig_of()
    wanted = rig.host.pending[prompt.name]
    if not registered:
        del rig.host.pending[prompt.name]
    if first_tokens < TOKENS:
        rig.step((prompt, first_tokens))
    unseen_step(rig, prompt)
    rig.finish(prompt)
    rig.settle()
    if not registered:
        assert rig.writer.waiting() == ["p-1"]
        rig.writer.register("p-1", wanted)
        rig.settle()

    assert rig.decoders["D"].holds(prompt, wanted, rig.layers)
    assert rig.host.released == ["p-1"]
    assert [record.outcome for record in rig.trace.records] == ["completed"]
    rig.assert_clean()


def test_a_request_with_an_unended_last_step_is_sent_at_the_next_step() -> None:
    """All ranks of a pipeline but the last see this in vLLM's V1 runner with a drafter."""
    rig, prompt = rig_of()
    wanted = rig.host.pending[prompt.name]
    chunk = prompt.chunk(TOKENS)
    rig.capture.arm(StepPlan((chunk,)))
    rig.compute(prompt, chunk)
    rig.finish(prompt)
    rig.settle()
    assert rig.host.released == []
    rig.capture.arm(StepPlan())
    rig.settle()
    assert rig.host.released == ["p-1"]
    assert rig.decoders["D"].holds(prompt, wanted, rig.layers)
    rig.assert_clean()


@pytest.mark.parametrize("wait", [False, True], ids=["in the queue", "behind a fence"])
@pytest.mark.parametrize("seen", [False, True], ids=["abort first", "step first"])
def test_an_abort_does_not_overtake_its_own_step(wait: bool, seen: bool) -> None:
    """Else the step would reopen a push that never ends, and complete it over blocks that P has given away."""
    rig, prompt = rig_of()
    device = SlowDevice(done=not wait)
    rig.capture._fences = device
    unseen_step(rig, Prompt("p-2", TOKENS, list(range(20, 28))))
    unseen_step(rig, prompt)
    if seen:
        rig.writer.turn()
    rig.abort(prompt)
    rig.scribble(prompt.table)
    if not seen:
        rig.writer.turn()
    device.done = True
    rig.settle()

    assert rig.decoders["D"].told() == [[]]
    assert "p-1" not in rig.writer
    assert not rig.p._live


@pytest.mark.parametrize("seen", [False, True], ids=["abort first", "step first"])
def test_an_aborted_push_counts_once_before_and_after_its_step(seen: bool) -> None:
    rig, prompt = rig_of()
    del rig.host.pending[prompt.name]
    unseen_step(rig, prompt)
    if seen:
        rig.writer.turn()
    rig.abort(prompt)
    rig.settle()
    assert [record.outcome for record in rig.trace.records] == ["cancelled"]
    assert rig.host.endings == {"p-1": ["aborted"]}
    rig.assert_clean()


@pytest.mark.parametrize("reads", [1, 2, 3])
def test_an_aborted_push_counts_once_while_its_step_begins(reads: int) -> None:
    """The main thread aborts the request when the writer has begun to read its chunk."""
    rig, prompt = rig_of()
    del rig.host.pending[prompt.name]
    done: list[str] = []

    class Chunk(ChunkPlan):
        def __getattribute__(self, name: str) -> Any:
            if name == "request_id" and armed and not rig.capture._void_lock.locked():
                done.append(name)
                if len(done) == reads:
                    rig.abort(prompt)
            return super().__getattribute__(name)

    armed = False
    plan = prompt.chunk(TOKENS)
    rig.capture.arm(StepPlan((Chunk(*(getattr(plan, each.name) for each in fields(plan))),)))
    rig.capture.sweep()
    armed = True
    rig.settle()
    assert len(done) >= reads
    assert [record.outcome for record in rig.trace.records] == ["cancelled"]
    assert rig.host.endings == {"p-1": ["aborted"]}
    rig.assert_clean()


def test_a_prompt_repeated_in_the_step_of_its_abort_is_pushed() -> None:
    rig, prompt = rig_of()
    wanted = rig.host.pending[prompt.name]
    unseen_step(rig, prompt, 9)
    again = Prompt("p-1", TOKENS, list(range(30, 38)))
    chunk = again.chunk(TOKENS)
    rig.capture.arm(StepPlan((chunk,)), ["p-1"])
    rig.compute(again, chunk)
    rig.capture.sweep()
    rig.settle()
    if rig.host.failures:
        rig.decoders["D"].hand_out(wanted)
        rig.writer.register("p-1", wanted)
        rig.settle()

    rig.assert_delivered(again, wanted)


@pytest.mark.parametrize("wait", [False, True], ids=["in the queue", "behind a fence"])
def test_layers_queued_before_a_preemption_are_not_sent(wait: bool) -> None:
    rig, prompt = rig_of()
    wanted = rig.host.pending[prompt.name]
    device = SlowDevice(done=not wait)
    rig.capture._fences = device
    unseen_step(rig, prompt, 9)
    rig.scribble(prompt.table)
    for first in (20, 40):
        prompt.preempted(list(range(first, first + 8)))
        chunk = prompt.chunk(12)
        rig.capture.arm(StepPlan((chunk,), ("p-1",)))
        rig.compute(prompt, chunk)
        rig.capture.sweep()
        if first == 20:
            rig.scribble(prompt.table)
    rig.writer.turn()
    device.done = True
    rig.settle()
    unseen_step(rig, prompt, TOKENS)
    rig.settle()

    rig.assert_delivered(prompt, wanted)


@pytest.mark.parametrize("how", ["aborted", "preempted", "expired"])
def test_blocks_revoked_during_the_last_write_get_no_completion(how: str) -> None:
    """The completion is checked against the scheduler's newest orders, not against the last turn's."""
    rig, prompt = rig_of()
    wanted = rig.host.pending[prompt.name]
    rig.fabric.faults.hold_writes = dict.fromkeys(range(rig.layers), 8)
    rig.step((prompt, TOKENS))
    if how == "expired":
        rig.finish(prompt)
    assert rig.writer.writes_in_flight("p-1")
    rig.writer._take_step_events()  # this turn has read its events when the scheduler takes the blocks away
    if how == "aborted":
        rig.abort(prompt)
    elif how == "expired":
        rig.expire(prompt)
    else:
        prompt.preempted(list(range(30, 38)))
        chunk = prompt.chunk(TOKENS)
        rig.capture.arm(StepPlan((chunk,), ("p-1",)))
    for _ in range(30):
        rig.writer._poll()
    assert rig.decoders["D"].told() == [[]]
    if how != "preempted":
        rig.settle()
        reason = "aborted" if how == "aborted" else "its lease ran out"
        assert rig.host.reported_failures() == [(reason, True, False)]
        rig.assert_clean()
        return
    rig.compute(prompt, chunk)
    rig.capture.sweep()
    rig.settle()
    rig.assert_delivered(prompt, wanted)


def test_a_finish_after_the_end_of_its_lease_starts_no_push() -> None:
    rig, prompt = rig_of()
    del rig.host.pending[prompt.name]
    rig.step((prompt, TOKENS))
    rig.capture.finish("p-1", (prompt.blocks,))
    rig.expire(prompt)
    rig.settle()
    assert rig.host.whole == {}
    assert rig.host.released == []
    rig.assert_clean()


def test_a_request_ends_if_its_lease_expires_before_its_first_event() -> None:
    """As in an engine that was stopped for a while."""
    rig, prompt = rig_of()
    unseen_step(rig, prompt)
    rig.capture.finish("p-1", (prompt.blocks,))
    rig.expire(prompt)
    rig.settle()
    assert rig.host.endings == {"p-1": ["its lease ran out"]}
    assert rig.decoders["D"].told() == [[]]


def test_a_repeated_prompt_without_plans_finishes_after_an_abort() -> None:
    """The prompt is too short for a plan. Another request's fence holds the queue, so no void step is forgotten."""
    rig, prompt = rig_of()
    device = SlowDevice()
    rig.capture._fences = device
    unseen_step(rig, Prompt("p-2", TOKENS, list(range(20, 28))))
    rig.abort(prompt)
    rig.writer.turn()
    rig.capture.arm(StepPlan())
    rig.capture.finish("p-1", (prompt.blocks,))
    rig.settle()
    assert rig.host.released == ["p-1"]


def provisional() -> tuple[Rig, Prompt]:
    """A prompt with blocks that another connector has loaded."""
    rig, prompt = Rig(), Prompt("p-1", TOKENS, list(range(1, 9)), provisional=True)
    rig.registers(prompt)
    return rig, prompt


@pytest.mark.parametrize("word", ["accepted", "finished"])
@pytest.mark.parametrize("landed", [True, False], ids=["after the last WRITE", "before the last WRITE"])
def test_a_completion_waits_for_the_schedulers_word(word: str, landed: bool) -> None:
    """The blocks go at once, layer by layer."""
    rig, prompt = provisional()
    wanted = rig.host.pending[prompt.name]
    rig.fabric.faults.hold_writes = dict.fromkeys(range(rig.layers), 0 if landed else 8)
    rig.step((prompt, TOKENS))
    if landed:
        rig.settle()
        assert rig.decoders["D"].holds(prompt, wanted, rig.layers)
        assert rig.writer._pushes["p-1"].session.state is State.UNCONFIRMED
    assert rig.decoders["D"].told() == [[]]
    rig.accept(prompt) if word == "accepted" else rig.finish(prompt)
    rig.settle()
    rig.assert_delivered(prompt, wanted)


def test_a_completion_waits_for_nothing_without_another_connector() -> None:
    """It leaves in the turn that sees the last WRITE land; neither the next step nor the request's end is needed."""
    rig, prompt = rig_of()
    wanted = rig.host.pending[prompt.name]
    rig.step((prompt, TOKENS))
    while rig.writer.writes_in_flight("p-1"):
        assert rig.decoders["D"].told() == [[]]
        rig.writer.turn()
    rig.assert_delivered(prompt, wanted)


@pytest.mark.parametrize("landed", [True, False], ids=["after the last WRITE", "during WRITEs"])
def test_a_step_that_was_taken_back_gets_no_completion(landed: bool) -> None:
    """Block 1 was garbage. The new epoch's WRITEs begin when the old ones have ended, and cover the whole prompt."""
    rig, prompt = provisional()
    wanted = rig.host.pending[prompt.name]
    if not landed:
        rig.fabric.faults.hold_writes = dict.fromkeys(range(rig.layers), 20)
    whole = prompt.kv
    prompt.kv = lambda layer, index: whole(layer, index) if index != 1 else whole(layer, 0)  # type: ignore[method-assign]
    rig.step((prompt, TOKENS))
    if landed:
        rig.settle()
    assert rig.writer.writes_in_flight("p-1") is not landed
    prompt.kv = whole  # type: ignore[method-assign]
    prompt.computed = 4
    chunk = prompt.chunk(TOKENS)
    assert (chunk.epoch, chunk.start, chunk.groups[0].first) == (1, 4, 0)
    before = len(rig.fabric.writes)
    rig.capture.arm(StepPlan((chunk,), rewound=("p-1",)))
    rig.compute(prompt, chunk)
    rig.capture.sweep()
    rig.writer.turn()
    assert rig.decoders["D"].told() == [[]]
    if not landed:
        assert len(rig.fabric.writes) == before, "a new WRITE beside the old ones"
    rig.settle()
    assert rig.decoders["D"].told() == [[]], "the new epoch is provisional, too"
    rig.accept(prompt)
    rig.settle()
    rig.assert_delivered(prompt, wanted)


def test_a_step_taken_back_before_its_word_is_seen_is_not_accepted() -> None:
    rig, prompt = provisional()
    rig.step((prompt, TOKENS))
    rig.settle()
    rig.capture.arm(StepPlan(accepted=("p-1",)))
    rig.capture.revoke(rewound=("p-1",))
    rig.settle()
    assert rig.decoders["D"].told() == [[]]


@pytest.mark.parametrize("how", ["rewound", "preempted"])
def test_a_step_taken_back_after_the_completion_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A preemption is no error: the same tokens are computed again."""
    recorder = Recorder()
    rig, prompt = Rig(meter=PushMeter(recorder)), Prompt("p-1", TOKENS, list(range(1, 9)))
    wanted = rig.registers(prompt)
    rig.step((prompt, TOKENS))
    rig.settle()
    rig.assert_delivered(prompt, wanted)
    if how == "rewound":
        prompt.computed = 4
        plan = StepPlan((prompt.chunk(TOKENS),), rewound=("p-1",))
    else:
        prompt.preempted(list(range(30, 38)))
        plan = StepPlan((prompt.chunk(TOKENS),), ("p-1",))
    rig.capture.arm(plan)
    rig.capture.sweep()
    rig.settle()
    assert recorder.take_delta().counted(REWOUND_PUSHES) == (how == "rewound")
    assert ("vLLM has taken back a step after its completion" in caplog.text) == (how == "rewound")
    assert rig.decoders["D"].told() == [[]]
    rig.finish(prompt)
    rig.settle()
    rig.assert_clean()
