"""From the forward pass to the writer: which layer of which step is ready.

The engine's main thread calls ``arm``, ``layer_saved``, ``sweep`` and ``finish``; it appends to a bounded queue and
never waits. The writer thread calls ``take``. A layer event that finds the queue full is dropped: the sweep at the end
of the step covers whatever no hook reported.

What takes a request's blocks away (abort, preemption, the end of a lease) must not queue behind steps that are still
being computed: ``revoke`` takes effect at once. From then on ``is_void`` is true of everything that was armed for the
request before, whether or not the writer has seen it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from layerpush.prefill.plan import ChunkPlan, StepPlan
from layerpush.prefill.protocol import Aborted, Event, Evicted, Preempted

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
    """A step with pushes begins. ``step`` counts the steps of this worker."""

    step: int
    chunks: tuple[ChunkPlan, ...]
    at: float


@dataclass(frozen=True, slots=True)
class LayerSaved:
    layer: int
    at: float


@dataclass(frozen=True, slots=True)
class Swept:
    """The step's forward is over: every layer that was not reported is ready too."""

    at: float


@dataclass(frozen=True, slots=True)
class Done:
    """The scheduler finished a request and holds its blocks for the push; after ``step`` no step computes it."""

    step: int
    request_id: str
    blocks: tuple[list[int], ...]
    at: float


StepEvent = Armed | LayerSaved | Swept | Done


class Capture:
    def __init__(self, layer_index: dict[str, int], wake: Callable[[], None], fences: FenceSource) -> None:
        self._layer_index = layer_index
        self._wake = wake
        self._fences = fences
        self._queue: deque[tuple[StepEvent, Fence | None]] = deque()
        self._armed = False
        self._step = 0
        self._void: dict[str, int] = {}
        self._revoked: deque[tuple[str, Event]] = deque()
        self.dropped = 0

    def arm(self, plan: StepPlan, aborted: Iterable[str] = ()) -> None:
        """Announce a step before its first layer runs, and whose blocks it takes away. An empty step costs nothing."""
        self._step += 1
        for request_id in plan.preempted:
            self._revoke(request_id, Preempted(), self._step)
        for request_id in aborted:
            self._revoke(request_id, Aborted(), self._step)
        self._armed = bool(plan.chunks)
        if plan.chunks:
            self._put(Armed(self._step, plan.chunks, time.perf_counter()), None)

    def expire(self, request_id: str) -> None:
        """The request's lease is over. Main thread, before its blocks are freed."""
        self._revoke(request_id, Evicted(), self._step + 1)

    def finish(self, request_id: str, blocks: tuple[list[int], ...]) -> None:
        """The scheduler finished a request. Main thread, or the writer thread on its behalf."""
        self._put(Done(self._step, request_id, blocks, time.perf_counter()), None)

    def revoked(self) -> Iterator[tuple[str, Event]]:
        """Take what was revoked since the last call. Writer thread."""
        while self._revoked:
            yield self._revoked.popleft()

    def is_void(self, request_id: str, step: int) -> bool:
        """Whether the blocks that ``step`` worked on have been taken from the request since. Any thread."""
        return self._void.get(request_id, 0) > step

    def forget_void(self, step: int) -> None:
        """Every step before ``step`` has been taken: what they had armed needs no more telling. Writer thread."""
        for request_id, since in list(self._void.items()):
            if since <= step:
                del self._void[request_id]

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

    def _revoke(self, request_id: str, event: Event, since: int) -> None:
        self._void[request_id] = since
        self._revoked.append((request_id, event))
        self._wake()

    def _put(self, event: StepEvent, fence: Fence | None) -> None:
        self._queue.append((event, fence))
        self._wake()
