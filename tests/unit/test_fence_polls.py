"""The writer's polls for fences in a step of a GPU, whose hooks are all queued before its first layer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import StepPlan
from layerpush.prefill import step_events
from layerpush.prefill.layer_interval import FENCE_POLL_S
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld

LAYERS, TOKENS = 12, 22


@dataclass
class Gpu:
    """Computes one layer after the other, each in ``layer_s`` seconds of its own clock."""

    layer_s: float
    now: float = 100.0
    due: list[float] = field(default_factory=list)

    def record(self) -> TimedFence:
        self.due.append((self.due[-1] if self.due else self.now) + self.layer_s)
        return TimedFence(self, self.due[-1])


@dataclass
class TimedFence:
    gpu: Gpu
    due: float

    def passed(self) -> bool:
        return self.gpu.now >= self.due

    def recycle(self) -> None:
        pass


@pytest.mark.parametrize("layer_s", [0.5e-3, 4.3e-3, 30e-3])
@pytest.mark.parametrize("by_layer", [True, False], ids=["by layer", "by chunk"])
def test_fences_are_found_in_time_with_few_polls(
    layer_s: float, by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(layer_s)
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.now)
    monkeypatch.setattr(step_events, "perf_counter", lambda: gpu.now)
    world = ScriptedWorld(layers=LAYERS, mode=PushMode.LAYER if by_layer else PushMode.CHUNK)
    world.capture._fences = gpu
    prompt = ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
    world.registers(prompt)
    world.capture.arm(StepPlan((prompt.chunk(TOKENS),)))
    for layer in range(LAYERS):
        world.capture.layer_saved(f"layers.{layer}")

    found: list[float] = []
    polls = 0
    while len(found) < LAYERS:
        world.turn()
        polls += 1
        found += [gpu.now] * (len(world.writer._step_layers) - len(found))
        assert world.sleep_s is not None
        gpu.now += world.sleep_s
    late = [at - due for at, due in zip(found, gpu.due, strict=True)]
    if by_layer:
        assert max(late) <= FENCE_POLL_S + 1e-9
    else:  # only the last layer counts, and the writer expects it from further away
        assert late[-1] <= 2 * FENCE_POLL_S
    if layer_s > 1e-3:
        assert polls < 0.4 * LAYERS * layer_s / FENCE_POLL_S
