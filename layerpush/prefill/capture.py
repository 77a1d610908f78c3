"""From the forward pass to the writer: which layer of which step is ready.

The engine's main thread calls ``arm``, ``layer_saved`` and ``sweep``; it appends to a bounded queue and never waits.
The writer thread calls ``take``. A layer event that finds the queue full is dropped: the sweep at the end of the
step covers whatever no hook reported.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from layerpush.prefill.plan import StepPlan

QUEUE_LIMIT = 1 << 16


class Fence(Protocol):
    """A point in the compute stream."""

    def passed(self) -> bool:
        """Whether everything before it has been computed. Never blocks. Writer thread."""

    def recycle(self) -> None:
        """Give the fence back to its pool. Writer thread."""


class FenceSource(Protocol):
    def record(self) -> Fence | None:
        """Mark this point of the current stream; None when what was called has been computed. Main thread."""


class NoFences:
    """For devices that compute before they return, as CPUs do."""

    def record(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Armed:
    """A step with pushes begins."""

    plan: StepPlan
    at: float


@dataclass(frozen=True, slots=True)
class LayerSaved:
    layer: int
    at: float


@dataclass(frozen=True, slots=True)
class Swept:
    """The step's forward is over: every layer that was not reported is ready too."""

    at: float


StepEvent = Armed | LayerSaved | Swept


class Capture:
    def __init__(self, layer_index: dict[str, int], wake: Callable[[], None], fences: FenceSource) -> None:
        self._layer_index = layer_index
        self._wake = wake
        self._fences = fences
        self._queue: deque[tuple[StepEvent, Fence | None]] = deque()
        self._armed = False
        self.dropped = 0

    def arm(self, plan: StepPlan) -> None:
        """Announce a step before its first layer runs. An empty plan costs nothing from here on."""
        self._armed = bool(plan.chunks)
        if plan:
            self._put(Armed(plan, time.perf_counter()), None)

    def layer_saved(self, name: str) -> None:
        """A layer's attention has written its KV (in stream order). Unknown layers share another layer's cache."""
        if not self._armed:
            return
        index = self._layer_index.get(name)
        if index is None:
            return
        if len(self._queue) >= QUEUE_LIMIT:
            self.dropped += 1
            return
        self._put(LayerSaved(index, time.perf_counter()), self._fences.record())

    def sweep(self) -> None:
        if self._armed:
            self._armed = False
            self._put(Swept(time.perf_counter()), self._fences.record())

    def take(self) -> Iterator[tuple[StepEvent, float]]:
        """Yield ``(event, time it became true)`` in order, up to the first that the device has not reached."""
        while self._queue:
            event, fence = self._queue[0]
            at = event.at
            if fence is not None:
                if not fence.passed():
                    return
                fence.recycle()
                at = time.perf_counter()
            self._queue.popleft()
            yield event, at

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    def _put(self, event: StepEvent, fence: Fence | None) -> None:
        self._queue.append((event, fence))
        self._wake()
