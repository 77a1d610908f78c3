"""Two engines that compute late, and random traffic between them: the same seed gives the same requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerpush.engine.worker import gathering, worker
from layerpush.prefill import fences
from layerpush.transport.gather import tensor_memory
from tests.connector.engine import NAMES
from tests.connector.late_engine import LateEngine
from tests.support.simulated_stream import CopyStream, SimulatedEvent, SimulatedStream
from tests.support.waiting import until

DEVICE = torch.device("cuda", 0)
FAMILIES = 3
"""Prompts of one family have a common prefix; those of two have no token in common at a position."""


@dataclass(frozen=True)
class Place:
    """Where the engines differ from the default. ``extra`` is the connector's configuration of both.

    ``aborts``: requests of P and of D are aborted.
    """

    extra: dict[str, Any] = field(default_factory=lambda: {"granularity": "layer", "packing": "off"})
    hooks: tuple[str, ...] = tuple(NAMES)
    drafted: tuple[str, ...] = ()
    microbatches: int = 1
    aborts: bool = True


PLACES = {
    "hooks": Place(),
    "auto": Place(extra={"granularity": "auto", "packing": "off"}),
    "no hooks": Place(hooks=()),
    "drafter without hooks": Place(hooks=(), drafted=(NAMES[-1],)),
    "drafter, whole requests": Place(extra={"layerwise": False}, hooks=(), drafted=(NAMES[-1],)),
    "microbatches": Place(microbatches=2),
    "gathered": Place(extra={"granularity": "layer", "packing": "gather", "staging_bytes": 16 << 20}),
}


class StaleBytesError(AssertionError):
    """D has read other bytes than a prompt's. The text names the layers, the requests and the tokens."""


class LateTraffic:
    """``serve`` runs all requests to their ends."""

    def __init__(self, build: Callable[..., Any], patch: pytest.MonkeyPatch, place: Place, seed: int) -> None:
        self._place, self._draw = place, random.Random(seed)
        ours, theirs = SimulatedStream(), SimulatedStream()
        simulate_device(patch, gathers=ours)
        own = {"hooks": place.hooks, "drafted": place.drafted, "microbatches": place.microbatches}
        self.p: LateEngine = self._built(build, "kv_producer", place.extra, ours, **own)
        self.d: LateEngine = self._built(build, "kv_consumer", {}, theirs)
        self.preempted = 0

    def _built(
        self, build: Callable[..., Any], role: str, extra: dict[str, Any], stream: SimulatedStream, **own: Any
    ) -> Any:
        made = {"stream": stream, "draw": random.Random(0), **own}
        return build(role, extra, kind=LateEngine, made=made, enable_prefix_caching=True)

    def serve(self, requests: int) -> None:
        """Raises ``StaleBytesError`` as soon as D has read other bytes than a prompt's."""
        for index in range(requests):
            self._arrive(f"r-{index}")
            if index % 4 == 1:
                self.p.step()
                self._preempt()
            for _ in range(self._draw.randrange(1, 5)):
                self.step()
            if self._place.aborts and self._draw.random() < 0.15:
                self._draw.choice([self.p, self.d]).abort(f"r-{self._draw.randrange(index + 1)}")
        until(self._is_over, "the end of all requests")

    def step(self) -> None:
        self.p.step()
        self.d.step()
        assert not self.p.wrong, "the simulated device breaks its own order"
        if self.d.wrong:
            raise StaleBytesError(self.d.wrong)

    def _arrive(self, request_id: str) -> None:
        family, tokens = self._draw.randrange(FAMILIES), self._draw.randrange(33, 200)
        first = 3 + family
        if self._draw.random() < 0.3:  # it computes a prefix in steps that push nothing
            self.p.add(f"{request_id}-local", tokens, None, first=first)
            self.p.step()
        prefill = partial(self.p.prefill, request_id, tokens, first=first)
        register = partial(
            self.d.decode_from, self.p, request_id, tokens, first=first, max_tokens=self._draw.randrange(2, 6)
        )
        if self._draw.random() < 0.5:
            prefill()
            self.p.step()
            register()
            return
        register()
        self.d.step()
        claims = self.p.worker.connector_worker.claims

        def has_come() -> bool:
            self.step()
            return bool(claims._claims.get((self.d.engine_id, request_id)).waits)

        until(has_come, "the registration")
        prefill()

    def _preempt(self) -> None:
        self.preempted += len(self.p.scheduler.running)
        with suppress(RuntimeError):  # blocks that a push holds stay in the prefix cache; the requests are preempted
            self.p.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _is_over(self) -> bool:
        self.step()
        return self.p.is_idle and self.d.is_idle and not len(self.p.pushes)


def copy_late(
    copy: Callable[..., None],
    model: SimulatedStream,
    *args: Any,
    stream: SimulatedStream | None = None,
    max_programs: int,
) -> None:
    (stream or model).put(partial(copy, *args, max_programs=max_programs))


def simulate_device(patch: pytest.MonkeyPatch, *, gathers: SimulatedStream) -> None:
    """Fences and copies are those of a GPU; the memory and the streams behind them are the host's.

    A copy that names no stream runs on ``gathers``, behind the model.
    """
    on_host = gathering.staging_memory
    patch.setattr(worker, "device_of", lambda _: DEVICE)
    patch.setattr(fences, "torch", SimpleNamespace(Event=SimulatedEvent))
    patch.setattr(gathering, "staging_memory", lambda size, _: on_host(size, torch.device("cpu")))
    patch.setattr(tensor_memory, "copy_stream", lambda _: CopyStream())
    patch.setattr(torch.cuda, "Event", SimulatedEvent)
    patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    patch.setattr(tensor_memory, "gather_blocks", partial(copy_late, tensor_memory.gather_blocks, gathers))
