"""The writer may be busy for a whole step: what the scheduler says afterwards must not overtake the step itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from layerpush.prefill.plan import StepPlan
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
    for layer in range(rig.layers):
        rig._compute(prompt, chunk, layer)
        rig.capture.layer_saved(f"layers.{layer}")
    rig.capture.sweep()


def rig_of() -> tuple[Rig, Prompt]:
    rig, prompt = Rig(), Prompt("p-1", TOKENS, list(range(1, 9)))
    rig.host.pending[prompt.name] = rig.asks(prompt, rig.decoder())
    return rig, prompt


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("first_tokens", [TOKENS, 9], ids=["one chunk", "the last of two chunks"])
def test_finished_does_not_overtake_its_own_step(registered: bool, first_tokens: int) -> None:
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
        rig.host.delegate("p-1", rig.host.unmatched.pop("p-1"), wanted)
        rig.settle()

    assert rig.decoders["D"].holds(prompt, wanted, rig.layers)
    assert rig.host.released == ["p-1"]
    assert [record.outcome for record in rig.trace.records] == ["completed"]
    rig.assert_clean()


def abort(rig: Rig) -> None:
    rig.writer.aborted("p-1")


def test_an_abort_does_not_overtake_its_own_step() -> None:
    """Else the step would open a push again that nobody ends, and tell D of blocks that P has given away."""
    rig, prompt = rig_of()
    unseen_step(rig, prompt)
    abort(rig)
    rig.scribble(prompt.table)
    rig.settle()

    assert rig.decoders["D"].told() == [[]]
    rig.assert_clean()


def test_an_abort_does_not_overtake_a_step_behind_a_fence() -> None:
    rig, prompt = rig_of()
    device = SlowDevice()
    rig.capture._fences = device
    other = Prompt("p-2", TOKENS, list(range(20, 28)))
    unseen_step(rig, other)
    unseen_step(rig, prompt)
    rig.writer.turn()
    abort(rig)
    rig.writer.turn()
    device.done = True
    rig.scribble(prompt.table)
    rig.settle()

    assert rig.decoders["D"].told() == [[]]
    assert "p-1" not in rig.writer
