"""The steps of real P in the simulation: each layer is ready when it was in the run. What is left to simulate is the
product, the link, and D.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from bench.fleet.engines import PrefillEngine
from bench.fleet.fleet import Fleet
from layerpush.core.step_plan import ChunkPlan
from layerpush.telemetry.trace_records import PushRecord


@dataclass
class RecordedStep:
    """``layers``: when each was ready, in seconds as ``at``. ``blocks`` that it computed of all prompts. ``ends``: the
    number of a request, and its prompt's blocks that are computed in the end.
    """

    prefill: int
    at: float
    layers: list[float]
    blocks: int = 0
    ends: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.layers[-1]


def recorded_steps(pushes: Sequence[PushRecord], prefill: int, began: float) -> list[RecordedStep]:
    """The steps of a series in their order; its requests went to so many P in turn, from ``began`` on."""
    found: dict[tuple[int, float], RecordedStep] = {}
    for number, push in enumerate(pushes):
        for index, chunk in enumerate(push.chunks):
            layers = sorted(at - began for of, _, at, _ in push.ready if of == index)
            key = (number % prefill, chunk.t_planned)
            step = found.setdefault(key, RecordedStep(key[0], chunk.t_planned - began, layers))
            step.blocks += chunk.end_block - chunk.start_block
            step.ends[number] = chunk.end_block
    return sorted(found.values(), key=lambda step: step.at)


def step_gaps(steps: Sequence[RecordedStep]) -> Iterator[float]:
    """Seconds between the steps of one P that go on with a prompt."""
    for prefill in {step.prefill for step in steps}:
        for step, later in pairwise(each for each in steps if each.prefill == prefill):
            if step.ends.keys() & later.ends.keys():
                yield later.at - step.end


class RecordedPrefill(PrefillEngine):
    """P, with the steps of a run."""

    def begin_step(self) -> None:
        """The run says when."""

    def replay(self, step: RecordedStep) -> None:
        """Begin a step."""
        prompts = {prompt.request.number - 1: prompt for prompt in self.prompts}
        chunks = list[ChunkPlan]()
        for number, blocks in step.ends.items():
            prompt = prompts[number]
            request, progress = prompt.request, prompt.progress
            if prompt.blocks is None:
                prompt.blocks = self.take(request, request.tokens)
                assert prompt.blocks is not None
            end = min(blocks * self.fleet.model.block_tokens, request.tokens)
            chunk = progress.advance(prompt.computed, end - prompt.computed, request.tokens, [prompt.blocks])
            prompt.computed = end
            chunks += [] if chunk is None else [chunk]
        self.compute(chunks, [later - at for at, later in pairwise((step.at, *step.layers))])


class RecordedFleet(Fleet):
    """A fleet whose P replay ``steps``."""

    prefill_engine = RecordedPrefill

    def __init__(self, steps: Sequence[RecordedStep], *args: Any) -> None:
        super().__init__(*args)
        for step in steps:
            self.clock.after(step.at, partial(self._replay, step))

    def _replay(self, step: RecordedStep) -> None:
        engine = self.engines[f"P{step.prefill}"]
        assert isinstance(engine, RecordedPrefill)
        engine.replay(step)
