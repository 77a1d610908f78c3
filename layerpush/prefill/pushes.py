"""The pushes of one prefill rank, and P's part of a turn of the writer thread.

``Pushes`` holds the table of pushes and knows which step is being computed. The worker's writer thread calls
``turn``, sleeps until ``next_due`` at most, and calls it again. A turn

1. takes the events that the forward pass and the scheduler have left in ``StepEvents``;
2. has each push poll its WRITEs;
3. has each push that streams, and that something has happened to, post its ready layers.

It only iterates; the push handles its events. A registration, a cancellation, an error or a WRITE of vLLM's reaches its
push through a method here, by request id, between turns, on the same thread.

While a step is being computed, ``LayerInterval`` tells when the writer polls for its layers. Then no layer but the last
one ends a sleep (``polls_layers``). A revocation ends any sleep. So do a step's last layer and its end, unless an
earlier event waits for its fence: the writer polls fences.

Every method runs on the writer thread, but for ``writes_in_flight``, ``engines_in_use``, ``computed``, ``is_computed``,
``waiting`` and ``active``: any thread may call those. A push that is over may stay in the table for a moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from layerpush.core.push_mode import MAX_IN_FLIGHT, SHORT_PROMPT, PushMode
from layerpush.core.step_plan import ChunkPlan
from layerpush.core.wire import Registration
from layerpush.prefill.layer_interval import FENCE_POLL_S, LONGEST_S, LayerInterval
from layerpush.prefill.links import Links
from layerpush.prefill.push import Identity, Push, PushServices, Registry
from layerpush.prefill.push_protocol import (
    Aborted,
    CancelledByD,
    Finished,
    LeaseExpired,
    Planned,
    Ready,
    ResultsAccepted,
    State,
)
from layerpush.prefill.push_session import PushSession
from layerpush.prefill.push_table import PushTable
from layerpush.prefill.samples import Sampler
from layerpush.prefill.step_events import (
    ForwardEnded,
    LayerSaved,
    RequestFinished,
    StepEvents,
    StepsAccepted,
    StepStarted,
)
from layerpush.prefill.step_schedule import StepSchedule
from layerpush.prefill.unhooked_layers import UnhookedLayers
from layerpush.telemetry.defects import logged
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import PushRecord
from layerpush.transport.transfer import Transfer
from layerpush.transport.writes import Writes

logger = logging.getLogger(f"vllm.{__name__}")

WRITE_POLL_S = 300e-6
RELEASE_RETRY_S = 1.0


class Pushes:
    """See the module's text."""

    registry: Registry
    """Set before the first turn: it asks for pushes, as pushes ask for it."""
    max_in_flight = MAX_IN_FLIGHT
    """So many WRITEs of one push may be in flight."""

    def __init__(
        self,
        identity: Identity,
        mode: PushMode,
        writes: Writes,
        step_events: StepEvents,
        links: Links,
        trace: TraceFile,
        meter: PushMeter,
        sampler: Sampler | None = None,
    ) -> None:
        self._identity = identity
        self._layout = layout = writes.layout
        self._mode = mode
        self._step_events = step_events
        self._trace = trace
        self._writes = writes
        self._layer_groups = tuple(layer.group for layer in layout.layers)
        self._layer_interval = LayerInterval()
        self._schedule = StepSchedule(len(self._layer_groups), self._layer_interval)
        self._unhooked = UnhookedLayers(identity.model, layout, identity.captured_tokens)
        self._pushes = PushTable()
        self._services = PushServices(
            links,
            writes,
            sampler,
            meter,
            trace,
            self._is_revoked,
            self._pushes.changed,
            self._closed,
        )
        self._step: list[tuple[Push, ChunkPlan]] = []
        self._step_layers: set[int] = set()
        self._step_swept: list[int] = []
        self._held: dict[str, Push] = {}
        """Pushes whose ready layers wait for more."""
        self._current = self._swept = 0
        self.polls_layers = False
        """Whether the writer polls for the layers of the running step by itself, so that none has to wake it."""

    # The turn.

    def turn(self) -> None:
        """Take the events of the forward pass, poll WRITEs, post ready layers."""
        self._take_step_events()
        self._poll()
        step = {push.request_id for push, _ in self._step}
        self._schedule.decide(self._pushes.streaming.values(), step, len(self._step_layers), time.perf_counter())
        eventful = self._held | self._pushes.take_eventful()
        self._held = {}
        for push in eventful.values():
            if push.is_streaming:
                wait = push.request_id in step and self._schedule.waits(push)
                push.post_ready(wait=wait)
                if wait:
                    self._held[push.request_id] = push

    def _take_step_events(self) -> None:
        self._take_revoked()
        for event, at in self._step_events.take_events():
            if isinstance(event, LayerSaved):
                self._layer_interval.layer_ready(at)
                if event.layer not in self._step_layers:
                    self._layer_ready(event.layer, at, hooked=True)
            elif isinstance(event, StepStarted):
                self._begin_step(event, at)
            elif isinstance(event, ForwardEnded):
                self._sweep(event.layers, at)
            elif isinstance(event, StepsAccepted):
                self._accepted(event)
            elif isinstance(event, RequestFinished):
                self._finished(event)
            else:
                self._end_step(at)
        for done in self._step_events.take_finished(self._swept):
            self._finished(done)
        self._step_events.forget_void()

    def _accepted(self, event: StepsAccepted) -> None:
        for request_id in event.request_ids:
            push = self._pushes.get(request_id)
            if push is not None and push.accepts(ResultsAccepted):
                push.handle(ResultsAccepted())

    def _take_revoked(self) -> None:
        for revoked in self._step_events.take_revoked():
            request_id, event = revoked.request_id, revoked.event
            push = self._pushes.get(request_id)
            if push is None and isinstance(event, Aborted | LeaseExpired):
                if revoked.started > self._current:
                    # It ended before the writer saw its first step. It counts as a push.
                    push = self._open(request_id, whole=False)
                else:
                    self._report_ended(request_id, event.reason)
            if push is not None and push.accepts(type(event)):
                logger.info("push of %s: %s", request_id, event.reason)
                push.handle(event)

    def _is_revoked(self, push: Push) -> bool:
        if not self._step_events.is_void(push.request_id, push.step):
            return False
        self._take_revoked()
        return True

    def _begin_step(self, event: StepStarted, at: float) -> None:
        while (void := self._step_events.void_in(event)) is None:
            self._take_revoked()
        self._current = event.step
        self._step, self._step_layers, self._step_swept = [], set(), []
        self._layer_interval.step_begins()
        for chunk in event.chunks:
            if chunk.request_id in void:
                continue
            push = self._pushes.get(chunk.request_id)
            if push is None:
                if chunk.index > 0:
                    continue
                push = self._open(chunk.request_id, chunk.whole, chunk.mode)
            push.handle(Planned(chunk))
            push.chunk_planned(chunk, event.step, at)
            if chunk.cached:
                for layer in range(len(self._layer_groups)):
                    self._ready(push, chunk, layer, at, hooked=None)
            else:
                self._step.append((push, chunk))
            if push.state is State.WAITING:
                registration = self.registry.take_registration(push.request_id, time.perf_counter())
                if registration is not None:
                    push.register(registration)

    def _end_step(self, at: float) -> None:
        self._sweep(range(len(self._layer_groups)), at)
        swept = self._step_swept
        self._schedule.step_ended(len(self._layer_groups) - len(swept))
        if swept and self._step_events.is_hooked:
            tokens = [chunk.end - chunk.start for push, chunk in self._step if push.mode.by_layer]
            self._unhooked.step_ended(swept, max(tokens, default=0))
        self._step, self._swept = [], self._current

    def _sweep(self, layers: Iterable[int], at: float) -> None:
        """Those of ``layers`` that no hook has reported are ready."""
        swept = sorted(set(layers) - self._step_layers)
        self._step_swept += swept
        for layer in swept:
            self._layer_ready(layer, at, hooked=False)

    def _layer_ready(self, layer: int, at: float, *, hooked: bool) -> None:
        self._step_layers.add(layer)
        for push, chunk in self._step:
            self._ready(push, chunk, layer, at, hooked)

    def _ready(self, push: Push, chunk: ChunkPlan, layer: int, at: float, hooked: bool | None) -> None:
        if push.accepts(Ready):
            push.record.ready_at(chunk.index, layer, at, hooked, keep=self._trace.enabled)
            push.handle(Ready(chunk.epoch, chunk.index, layer))

    def _finished(self, done: RequestFinished) -> None:
        if self._step_events.is_void(done.request_id, done.step):
            return
        push = self._pushes.get(done.request_id)
        if push is None:
            push = self._open(done.request_id, whole=True, chosen=PushMode.WHOLE if done.is_turn else None)
            push.is_turn = done.is_turn
        push.blocks, push.tokens, push.step = done.blocks, done.tokens, done.step
        push.finished_at = time.perf_counter()
        push.handle(Finished(done.sampled))

    def _open(self, request_id: str, whole: bool, chosen: PushMode | None = None) -> Push:
        """``whole``: the scheduler has no blocks to push before prefill ends. ``chosen``: see ``ChunkPlan``."""
        mode, fallback = chosen or self._mode, None
        if mode is not PushMode.WHOLE:
            fallback = self._identity.fallback or (SHORT_PROMPT if whole else None)
        served = mode if fallback is None else PushMode.WHOLE
        session = PushSession(request_id, self._layer_groups, self._layout.layer_bytes, served, self.max_in_flight)
        record = PushRecord(
            request_id=request_id,
            engine_id=self._identity.engine_id,
            rank=self._identity.rank,
            mode=mode,
            fallback=fallback,
        )
        push = Push(session, record, self.registry, self._services)
        self._pushes.add(push)
        return push

    def _closed(self, push: Push) -> None:
        if self._pushes.get(push.request_id) is push:
            self._pushes.remove(push)
            self._report_ended(push.request_id, push.session.failure)
            with logged("its trace", push.request_id):
                self._trace.write_record(push.record)

    def _report_ended(self, request_id: str, failure: str | None) -> None:
        with logged("an ending", request_id):
            self.registry.push_ended(request_id, failure, time.perf_counter())

    def _poll(self) -> None:
        self._writes.release_leftovers(time.perf_counter(), RELEASE_RETRY_S)
        for push in list(self._pushes.in_flight.values()):
            try:
                push.poll()
            except Exception as error:  # noqa: BLE001  a transport that breaks its contract ends this push, not all
                push.fail(f"{type(error).__name__}: {error}")

    # The sleep until the next turn.

    def next_due(self, now: float) -> float | None:
        """When the next turn has something to do, unless an event wakes the writer first; None: not before.

        Also decides ``polls_layers``, for the sleep that follows.
        """
        if self._pushes.eventful:
            return now  # a push began to stream after the turn
        layers, events = self._layers_due(now), None
        self.polls_layers = layers is not None
        if self._step_events.pending and (layers is None or not self._layer_interval.is_measured):
            events = now + FENCE_POLL_S
        leftovers = now + RELEASE_RETRY_S if self._writes.has_leftovers else None
        times = (layers, events, self._writes_due(now), leftovers)
        return min((at for at in times if at is not None), default=None)

    def _layers_due(self, now: float) -> float | None:
        """When to look for layers of the running step; None if none is missing, or if each has to wake the writer."""
        missing = len(self._layer_groups) - len(self._step_layers)
        if not self._step or not missing:
            return None
        streaming = [push for push, _ in self._step if push.is_streaming]
        all_wait = all(self._schedule.waits(push) for push in streaming)
        return self._layer_interval.next_due(
            now,
            missing,
            by_layer=any(push.mode.by_layer for push, _ in self._step),
            leave_at=self._schedule.leave_at if all_wait else None,
            fenced=self._step_events.has_fences,
        )

    def _writes_due(self, now: float) -> float | None:
        """When to poll WRITEs. Those of the running step may wait, unless a push may go on as soon as one has ended."""
        if not self._pushes.in_flight:
            return None
        computed = {push.request_id for push, _ in self._step}
        if len(self._step_layers) == len(self._layer_groups) or any(
            push.request_id not in computed or any(transfer.needs_polling for transfer in push.transfers)
            for push in self._pushes.in_flight.values()
        ):
            return now + WRITE_POLL_S
        return max(now + WRITE_POLL_S, min(self._schedule.next_due(now), now + LONGEST_S))

    # Between turns.

    def register(self, request_id: str, registration: Registration) -> None:
        """A decode engine asks for a request of ``waiting``."""
        self._pushes[request_id].register(registration)

    def cancel(self, request_id: str, key: tuple[str, str]) -> bool:
        """The decode engine cancels its registration ``key``: it wants the blocks back.

        True if no WRITE for it is or will be on the wire; else ``Registry.report_failure`` follows.
        """
        push = self._pushes.get(request_id)
        if push is None or push.key != key:
            return True
        if not push.accepts(CancelledByD):
            return not push.in_flight
        push.handle(CancelledByD())
        return False

    def decline(self, request_id: str) -> bool:
        """No decode engine will register this request of ``waiting``. False if its prefill has not ended."""
        push = self._pushes[request_id]
        if push.accepts(CancelledByD):
            push.handle(CancelledByD())
            return True
        return False

    def request_ended(self, request_id: str) -> None:
        """The main thread has reported the request as sent, or its lease is over."""
        push = self._pushes.get(request_id)
        if push is not None:
            push.handle(LeaseExpired())

    def fail(self, request_id: str, reason: str) -> None:
        """An error outside the session ends the push."""
        push = self._pushes.get(request_id)
        if push is not None:
            push.fail(reason)

    def fail_engine(self, decode_engine_id: str, reason: str) -> None:
        """A decode engine is gone: fail its pushes."""
        for (engine_id, _), pushes in list(self._pushes.serving.items()):
            for push in list(pushes.values()) if engine_id == decode_engine_id else ():
                push.fail(reason)

    def fail_all(self, reason: str) -> None:
        """Fail every push. Raises nothing: a push that cannot fail must not save the others."""
        for push in list(self._pushes.values()):
            with logged("its failure", push.request_id):
                push.fail(reason)

    def push_deferred(self, request_id: str, blocks: Any, registration: dict[str, Any]) -> None:
        """vLLM's whole push had to wait for a handshake, which is over."""
        push = self._pushes.get(request_id)
        if push is not None:
            push.begin_whole(partial(self._services.links.worker.push_whole, request_id, blocks, registration))

    def adopt(self, request_id: str, transfer: Transfer, decode_engine_id: str, decode_request_id: str) -> None:
        """Watch one of vLLM's whole WRITEs."""
        push = self._pushes.get(request_id) or self._open(request_id, whole=True)
        push.adopt(transfer, decode_engine_id, decode_request_id)

    def drain(self, seconds: float) -> int:
        """Wait for the WRITEs on the wire, for shutdown. Returns the number of WRITEs that are still on the wire."""
        deadline = time.perf_counter() + seconds
        while self._pushes.in_flight and time.perf_counter() < deadline:
            self._poll()
            time.sleep(WRITE_POLL_S)
        left = [transfer for push in self._pushes.values() for transfer in push.transfers]
        for transfer in left:
            self._writes.release(transfer)
        return len(left)

    # Queries.

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pushes

    def __len__(self) -> int:
        return len(self._pushes)

    @property
    def active(self) -> int:
        """The number of pushes that have not ended. Any thread."""
        return sum(push.record.outcome == "pending" for push in list(self._pushes.values()))

    def writes_in_flight(self, request_id: str) -> bool:
        """Whether a WRITE reads from this request's blocks. Any thread."""
        push = self._pushes.get(request_id)
        return push is not None and push.in_flight

    @property
    def engines_in_use(self) -> set[str]:
        """Decode engines whose registrations live pushes serve. Any thread."""
        return {engine_id for engine_id, _ in list(self._pushes.serving)}

    @property
    def engines_in_flight(self) -> set[str]:
        """Decode engines that a WRITE is on its way to."""
        return {
            push.record.decode_engine_id
            for push in self._pushes.in_flight.values()
            if push.record.decode_engine_id is not None
        }

    @property
    def awaiting(self) -> int:
        """The number of pushes that wait for a registration or a handshake."""
        return len(self._pushes.awaiting)

    @property
    def is_draining(self) -> bool:
        """Whether a push that has ended still waits for its WRITEs."""
        return bool(self._pushes.draining)

    def serving(self, key: tuple[str, str]) -> str | None:
        """The live request that serves a registration."""
        return next(iter(self._pushes.serving.get(key, ())), None)

    def computed(self) -> list[str]:
        """Requests whose prefill has ended and that no decode engine has registered. Any thread."""
        return [request_id for request_id in list(self._pushes.unclaimed) if self.is_computed(request_id)]

    def is_computed(self, request_id: str) -> bool:
        """Whether this is a request of ``computed``. Any thread."""
        push = self._pushes.unclaimed.get(request_id)
        return push is not None and push.state is State.WHOLE and not push.is_turn

    @property
    def has_registered_prompts(self) -> bool:
        """Whether a decode engine has registered a request whose prefill has begun, and has not ended."""
        return any(
            push.finished_at is None and push.key is not None and push.record.outcome == "pending"
            for push in self._pushes.values()
        )

    def is_waiting(self, request_id: str) -> bool:
        """Whether this is a request that no decode engine has registered yet."""
        return request_id in self._pushes.unclaimed

    def waiting(self) -> list[str]:
        """Requests that no decode engine has registered yet. Kept turns do not wait for one. Any thread."""
        return [push.request_id for push in list(self._pushes.unclaimed.values()) if not push.is_turn]
