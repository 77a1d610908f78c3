"""Guards that can be removed, to show that they are needed on a device that computes late, and that a test notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from layerpush.engine.worker import worker
from layerpush.prefill import step_events
from layerpush.prefill.fences import StreamFence
from layerpush.prefill.step_events import (
    ForwardEnded,
    LayerSaved,
    RequestFinished,
    StepEnded,
    StepEvents,
    StepStarted,
)
from layerpush.transport.gather import tensor_memory
from layerpush.transport.gather.tensor_memory import TensorStaging

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """``place`` names the traffic in which the guard matters. Requests by ``seed`` need the guard soon."""

    name: str
    remove: Callable[[Patch], None]
    place: str
    seed: int


MUTANTS: list[Mutant] = []


def mutant(place: str, seed: int = 0) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(remove: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(remove.__name__.replace("_", " "), remove, place, seed))
        return remove

    return add


@mutant("hooks")
def a_gpu_has_no_fences(patch: Patch) -> None:
    patch.setattr(worker, "fences_for", lambda _: None)


@mutant("hooks")
def a_fence_has_always_passed(patch: Patch) -> None:
    patch.setattr(StreamFence, "passed", lambda _: True)


@mutant("auto")
def a_fence_is_not_recorded(patch: Patch) -> None:
    patch.setattr(StreamFence, "record", lambda _: None)


def _unfenced(patch: Patch, kind: type[step_events.StepEvent]) -> None:
    put = StepEvents._put

    def mutated(self: StepEvents, event: step_events.StepEvent, *args: Any, fenced: bool = True) -> None:
        put(self, event, *args, fenced=fenced and not isinstance(event, kind))

    patch.setattr(StepEvents, "_put", mutated)


@mutant("hooks")
def a_layer_is_not_fenced(patch: Patch) -> None:
    _unfenced(patch, LayerSaved)


@mutant("no hooks")
def the_end_of_a_step_is_not_fenced(patch: Patch) -> None:
    _unfenced(patch, StepEnded)


@mutant("drafter without hooks")
def the_end_of_the_models_forward_is_not_fenced(patch: Patch) -> None:
    _unfenced(patch, ForwardEnded)


@mutant("drafter, whole requests")
def the_end_of_a_request_is_not_fenced(patch: Patch) -> None:
    _unfenced(patch, RequestFinished)


@mutant("hooks", seed=6)
def cached_blocks_are_not_fenced(patch: Patch) -> None:
    """The step before may still compute them, and push nothing itself."""
    _unfenced(patch, StepStarted)


@mutant("microbatches")
def a_microbatchs_hook_counts(patch: Patch) -> None:
    patch.setattr(worker, "microbatches", lambda _: 1)


@mutant("gathered")
def a_gather_is_over_once_it_has_begun(patch: Patch) -> None:
    patch.setattr(tensor_memory._StreamCopy, "is_over", lambda _: True)


@mutant("gathered")
def a_gather_runs_on_another_stream_than_its_events(patch: Patch) -> None:
    gather = TensorStaging.gather

    def mutated(self: TensorStaging, *args: Any) -> Any:
        late = tensor_memory.gather_blocks
        with patch.context() as here:
            here.setattr(
                tensor_memory,
                "gather_blocks",
                lambda *operands, **options: late(*operands, **options | {"stream": None}),
            )
            return gather(self, *args)

    patch.setattr(TensorStaging, "gather", mutated)
