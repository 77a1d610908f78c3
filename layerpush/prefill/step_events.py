"""Events from the forward pass to the writer: steps begin, layers become ready, steps end.

The engine's main thread calls ``arm``, ``layer_saved``, ``forward_ended``, ``sweep`` and ``finish``; it appends to a
bounded queue and never waits. The threads of microbatches, of which one at a time runs, call ``layer_saved`` in its
place. The writer thread calls ``take_events``. A layer event that finds the queue full is
dropped: the sweep at the end of the step covers every layer that no hook reported.

``layer_saved`` runs between a model's operations, with cold processor caches. There each object and each call costs
about a microsecond. So the events of layers are made once, and one entry of the queue is all that a hook makes.

A revocation takes a request's blocks away, or steps back that have filled them: an abort, a preemption, a rewind, the
end of a lease. It must not queue behind steps that are still being computed, so it takes effect at once. From then on
``is_void`` is true of every step that was armed for the request before, whether or not the writer has seen it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from layerpush.core.first_token import Sampled
from layerpush.core.step_plan import ChunkPlan, StepPlan
from layerpush.prefill.push_protocol import Aborted, LeaseExpired, Preempted, Rewound

QUEUE_LIMIT = 1 << 16


class Fence(Protocol):
    """A point in the compute stream."""

    def passed(self) -> bool:
        """Whether everything before it has been computed. Never blocks. Writer thread."""

    def recycle(self) -> None:
        """Give the fence back to its pool. Writer thread."""


class FenceSource(Protocol):
    """Makes fences for one device."""

    def record(self) -> Fence:
        """Mark this point of the current stream. Main thread."""


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step with pushes begins. ``step`` counts the steps of this worker."""

    step: int
    chunks: tuple[ChunkPlan, ...]


@dataclass(frozen=True, slots=True)
class LayerSaved:
    """A layer of the step is in memory, once the event's fence has passed. ``layer`` is its index in the layout."""

    layer: int


@dataclass(frozen=True, slots=True)
class ForwardEnded:
    """The model's forward is over: each of ``layers`` that was not reported is ready. A drafter computes the others."""

    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The step's forward is over: every layer that was not reported is ready too."""


@dataclass(frozen=True, slots=True)
class StepsAccepted:
    """No step of these requests' prompts that began before can be taken back any more."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The scheduler finished a request and holds its blocks for the push.

    ``computed`` is the last step that was armed for it, 0 if none was; ``step`` is the last that was armed at all.
    Its prompt has ``tokens`` tokens. Or it is a turn that this decode engine keeps, with so many tokens.
    """

    computed: int
    step: int
    request_id: str
    blocks: tuple[list[int], ...]
    sampled: Sampled | None
    tokens: int = 0
    is_turn: bool = False


@dataclass(frozen=True, slots=True)
class Revoked:
    """``event`` takes a request's blocks away. ``started`` is the first step that was armed for it, 0 if none was."""

    request_id: str
    event: Preempted | Rewound | Aborted | LeaseExpired
    started: int


StepEvent = StepStarted | LayerSaved | ForwardEnded | StepEnded | StepsAccepted | RequestFinished


class StepEvents:
    """``fences`` is None for a device that computes before it returns, as a CPU does.

    ``wake_lazily`` replaces ``wake`` for every layer but a step's last: the writer may find it at its next poll.
    vLLM may split a step into ``microbatches``, each of which calls every layer's hook; ``microbatch`` returns the
    calling one's number, None in a step that is not split. ``drafted`` has the layers that may be computed after the
    model's forward, also those that no hook counts for.
    """

    def __init__(
        self,
        layer_index: dict[str, int],
        wake: Callable[[], None],
        fences: FenceSource | None,
        *,
        wake_lazily: Callable[[], None] | None = None,
        microbatches: int = 1,
        microbatch: Callable[[], int | None] = lambda: None,
        drafted: Set[str] = frozenset(),
    ) -> None:
        self.drafted = drafted
        self._layer_index = layer_index
        self._layer_saved = {name: LayerSaved(index) for name, index in layer_index.items()}
        self._microbatches, self._microbatch = microbatches, microbatch
        self._computed: dict[str, set[int]] = {}
        self._layers = len(set(layer_index.values()))
        self._to_come = 0
        self._wake = wake
        self._wake_lazily = wake_lazily or wake
        self._fences = fences
        self._queue: deque[tuple[StepEvent, float, Fence | None]] = deque()
        self._armed = self._running = False
        self._step = self._taken = 0
        self._void: dict[str, int] = {}
        """The first step that is not void, of requests whose earlier steps are."""
        self._revoked: deque[Revoked] = deque()
        self._finished: deque[RequestFinished] = deque()
        self._first_step: dict[str, int] = {}
        self._last_step: dict[str, int] = {}
        self._void_lock = threading.Lock()  # held for a few dict operations, never across a call
        self.dropped = 0

    def arm(self, plan: StepPlan, aborted: Iterable[str] = ()) -> None:
        """Announce a step, and the requests that lose their blocks in it, before its first layer runs. Main thread.

        Ends the step before if vLLM has not: in a pipeline with a drafter, only the last rank's runner does.
        """
        self.revoke(plan.preempted, aborted, plan.rewound)
        self.sweep()
        if plan.accepted:
            self._put(StepsAccepted(plan.accepted), self._wake, fenced=False)
        self._step += 1
        self._running, self._armed = True, bool(plan.chunks)
        self._to_come = self._layers
        self._computed.clear()
        if plan.chunks:
            for chunk in plan.chunks:
                self._first_step.setdefault(chunk.request_id, self._step)
                self._last_step[chunk.request_id] = self._step
            # The device may still compute earlier steps, and with them the cached blocks.
            fenced = any(chunk.cached for chunk in plan.chunks)
            self._put(StepStarted(self._step, plan.chunks), self._wake, fenced=fenced)

    def revoke(self, preempted: Iterable[str] = (), aborted: Iterable[str] = (), rewound: Iterable[str] = ()) -> None:
        """These requests lose their blocks, or steps that have filled them, before the next step runs. Main thread."""
        for request_id in preempted:
            self._revoke(request_id, Preempted())
        for request_id in rewound:
            self._revoke(request_id, Rewound())
        for request_id in aborted:
            self._last_step.pop(request_id, None)
            self._revoke(request_id, Aborted())

    def expire(self, request_id: str) -> None:
        """The request's lease is over. Main thread, before its blocks are freed."""
        self._revoke(request_id, LeaseExpired())

    def finish(
        self,
        request_id: str,
        blocks: tuple[list[int], ...],
        sampled: Sampled | None = None,
        tokens: int = 0,
        *,
        is_turn: bool = False,
    ) -> None:
        """The scheduler finished a request, with so many ``tokens`` in its prompt, or in the turn. Main thread."""
        self._first_step.pop(request_id, None)
        computed = self._last_step.pop(request_id, 0)
        done = RequestFinished(computed, self._step, request_id, blocks, sampled, tokens, is_turn)
        if self.drafted and not computed:  # the device may still draft; nothing else says when it has
            self._put(done, self._wake)
            return
        self._finished.append(done)
        self._wake()

    def take_revoked(self) -> Iterator[Revoked]:
        """Take the revocations since the last call. Writer thread."""
        while self._revoked:
            yield self._revoked.popleft()

    def void_in(self, started: StepStarted) -> set[str] | None:
        """The requests whose blocks in a step are void; None: take the revocations first. Writer thread."""
        with self._void_lock:
            if self._revoked:
                return None
            return {chunk.request_id for chunk in started.chunks if self.is_void(chunk.request_id, started.step)}

    def is_void(self, request_id: str, step: int) -> bool:
        """Whether the blocks that ``step`` worked on have been taken from the request since. Any thread."""
        return self._void.get(request_id, 0) > step

    def take_finished(self, swept: int) -> list[RequestFinished]:
        """Take the finished requests whose last step is ``swept`` or before. They need not wait for later steps,
        but must not overtake their own: their KV is whole only after its sweep. Writer thread.
        """
        if not self._finished:
            return []
        taken = [self._finished.popleft() for _ in range(len(self._finished))]
        self._finished.extend(late for late in taken if late.computed > swept)
        return [done for done in taken if done.computed <= swept]

    def forget_void(self) -> None:
        """Forget the void steps that nobody asks about any more: everything that waits in the queue belongs to the last
        step that was taken, or to a later one. Writer thread.
        """
        if not self._void:
            return
        with self._void_lock:
            if self._revoked:
                return
            finished = {done.request_id for done in list(self._finished)}
            if self._queue or finished:
                kept = {each: void for each, void in self._void.items() if void > self._taken or each in finished}
            else:
                kept = {}
            self._void = kept

    def layer_saved(self, name: str) -> None:
        """A layer's attention has written its KV (in stream order), or that of a microbatch: the last one makes the
        layer ready. Unknown layers share another layer's cache. Main thread, or a microbatch's.
        """
        if not self._armed:
            return
        event = self._layer_saved.get(name)
        if event is None or (self._microbatches > 1 and not self._is_last(name)):
            return
        if len(self._queue) >= QUEUE_LIMIT:
            self.dropped += 1
            return
        self._to_come -= 1
        self._put(event, self._wake if self._to_come <= 0 else self._wake_lazily)

    def _is_last(self, name: str) -> bool:
        """Whether with this call the last of a step's microbatches has computed the layer."""
        number = self._microbatch()
        if number is None:
            return True
        computed = self._computed.setdefault(name, set())
        if number in computed:
            return False
        computed.add(number)
        return len(computed) == self._microbatches

    def forward_ended(self) -> None:
        """The model's forward is issued; sampling follows, and drafting if there is a drafter. Main thread."""
        if not self.drafted:
            self.sweep()
        elif self._armed and self._to_come > len(self._layer_index.keys() & self.drafted):
            layers = frozenset(index for name, index in self._layer_index.items() if name not in self.drafted)
            self._put(ForwardEnded(layers), self._wake)

    def sweep(self) -> None:
        """The step's forward is over: covers every layer that no hook reported. Later calls do nothing. Main thread."""
        self._running = False
        if self._armed:
            self._armed = False
            self._put(StepEnded(), self._wake)

    @property
    def steps(self) -> tuple[int, bool]:
        """The number of steps that have begun, and whether the last one runs. Any thread."""
        return self._step, self._running

    def take_events(self) -> Iterator[tuple[StepEvent, float]]:
        """Yield each event with its time in order, up to the first whose fence has not passed. Writer thread.

        Times are seconds of ``perf_counter``: of the hook, or of this call if the event has a fence.
        """
        now = perf_counter()
        while self._queue:
            event, at, fence = self._queue[0]
            if fence is not None:
                if not fence.passed():
                    return
                fence.recycle()
                at = max(at, now)
            self._queue.popleft()
            if isinstance(event, StepStarted):
                self._taken = event.step
            yield event, at

    @property
    def pending(self) -> bool:
        """Whether events wait to be taken. Any thread."""
        return bool(self._queue)

    @property
    def is_hooked(self) -> bool:
        """Whether the layers' hooks count."""
        return bool(self._layer_saved)

    @property
    def has_fences(self) -> bool:
        """Whether the device computes after its calls return."""
        return self._fences is not None

    def _revoke(self, request_id: str, event: Preempted | Rewound | Aborted | LeaseExpired) -> None:
        with self._void_lock:
            self._void[request_id] = self._step + 1
            self._revoked.append(Revoked(request_id, event, self._first_step.pop(request_id, 0)))
        self._wake()

    def _put(self, event: StepEvent, wake: Callable[[], None], *, fenced: bool = True) -> None:
        fence = None if self._fences is None or not fenced else self._fences.record()
        self._queue.append((event, perf_counter(), fence))
        if fence is None or len(self._queue) == 1:  # otherwise the writer is polling the fence before this one
            wake()
