"""The one thread that talks to the transport: takes in what has happened, and has sessions walk on.

Every method runs on the writer thread. Nothing here knows vLLM: what only the engine's worker can do is behind
``Host``, what arrives from the forward pass comes through ``Capture``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from layerpush.core.push_protocol import (
    Evicted,
    Finished,
    Planned,
    Pump,
    Ready,
    Retract,
    State,
    Withdrawn,
)
from layerpush.core.wire import Registration
from layerpush.prefill.actor import PushActor
from layerpush.prefill.layer_interval import LONGEST_S
from layerpush.prefill.push import BlockIds, Push
from layerpush.prefill.step_events import Armed, LayerSaved
from layerpush.transport.writes import PostedWrite, RankWrite

logger = logging.getLogger("vllm.layerpush.writer")

FENCE_POLL_S = 100e-6
WRITE_POLL_S = 300e-6
PEER_POLL_S = 1e-3
RELEASE_RETRY_S = 1.0


class PushWriter(PushActor):
    """What a worker calls, and the writer thread's turn."""

    def turn(self) -> None:
        """Take in what the forward pass reported, see what landed, post what is ready."""
        self._absorb()
        self._poll()
        if self._strategy is not None:
            self._strategy.turn(quiet=not self._pushes)
        while self._later:
            self._claim(*self._later.popleft())
        for push in list(self._pushes.values()):
            if push.dirty and push.session.state is State.STREAMING:
                push.dirty = False
                self._dispatch(push, Pump())

    @property
    def patience(self) -> float | None:
        """How long the writer may sleep, in seconds, if nobody wakes it; None is for ever."""
        if self._step_events.pending:
            return FENCE_POLL_S
        pace = self.pace
        if any(push.in_flight for push in self._pushes.values()):
            return pace if pace is not None and not self._has_urgent_writes else WRITE_POLL_S
        if self._strategy is not None and (self._strategy.in_flight if self._pushes else self._strategy.is_busy):
            return WRITE_POLL_S
        if any(push.awaits_peer for push in self._pushes.values()):
            return PEER_POLL_S if pace is None else min(PEER_POLL_S, pace)
        if pace is not None:
            return pace
        return RELEASE_RETRY_S if self._outbox.has_leftovers else None

    @property
    def pace(self) -> float | None:
        """Within how many seconds layers of the step that is being computed want to be looked at, unless somebody
        wakes the writer for each; None: it is not known, or no more are to come.
        """
        if not self._step or len(self._step_layers) >= len(self._layer_groups):
            return None
        by_layer = any(push.session.policy.by_layer for push, _ in self._step)
        return self._pace.seconds if by_layer else LONGEST_S

    def keeps_pace(self, patience: float) -> bool:
        """Whether who sleeps for so many seconds need not be woken for each layer."""
        pace = self.pace
        return pace is not None and patience <= pace

    @property
    def _has_urgent_writes(self) -> bool:
        """Whether a push may be over, or go on, as soon as a WRITE has ended."""
        computed = {push.request_id for push, _ in self._step}
        for push in self._pushes.values():
            if push.in_flight and (push.request_id not in computed or any(part.staged for part in push.parts)):
                return True
        return False

    @property
    def engines_in_flight(self) -> set[str]:
        timed = set() if self._strategy is None else self._strategy.engines_in_flight
        return super().engines_in_flight | timed

    def register(self, request_id: str, registration: Registration) -> None:
        """A decode engine asks for a request of ``waiting``."""
        self._registered(self._pushes[request_id], registration)

    def withdraw(self, request_id: str, key: tuple[str, str]) -> bool:
        """The decode engine wants the blocks of its registration ``key`` back.

        True when nothing of it is or will be on the wire; else ``Host.retract`` says so later.
        """
        push = self._pushes.get(request_id)
        if push is None or push.session.registration is None or push.session.registration.key != key:
            return True
        if not push.session.accepts(Withdrawn):
            return not push.in_flight
        push.withdrawn = True
        self._dispatch(push, Withdrawn(busy=push.delegated is not None))
        return False

    def reconnect(self, request_id: str, error: str | None) -> None:
        """The handshake that ``Host.connect`` started is over."""
        push = self._pushes.get(request_id)
        if push is None or push.session.state is not State.CONNECTING:
            return
        if error is not None:
            self._fail(push, f"handshake with the decode engine failed: {error}")
        elif push.session.registration is not None:
            self._connect(push, push.session.registration)

    def finished(self, request_id: str, blocks: BlockIds) -> None:
        """The scheduler finished a request and holds ``blocks`` for its push."""
        push = self._pushes.get(request_id)
        if push is None:
            push = self._open(request_id, streams=False)
        push.blocks, push.finished_at = blocks, time.perf_counter()
        self._dispatch(push, Finished())

    def evicted(self, request_id: str) -> None:
        """The main thread has reported the request as sent, or its lease is over."""
        push = self._pushes.get(request_id)
        if push is not None:
            self._dispatch(push, Evicted())

    def fail(self, request_id: str, reason: str) -> None:
        """Something outside the session went wrong for good."""
        push = self._pushes.get(request_id)
        if push is not None:
            self._fail(push, reason)

    def fail_engine(self, decode_engine_id: str, reason: str) -> None:
        """A decode engine is gone: what it asked for needs no writing any more."""
        for push in list(self._pushes.values()):
            registration = push.session.registration
            if registration is not None and registration.decode_engine_id == decode_engine_id and not push.session.told:
                self._fail(push, reason)

    def fail_all(self, reason: str) -> None:
        for request_id in list(self._pushes):
            self.fail(request_id, reason)

    def adopt(self, request_id: str, part: RankWrite, decode_engine_id: str, decode_request_id: str) -> None:
        """Watch one of upstream's whole-request WRITEs."""
        push = self._pushes.get(request_id)
        if push is None:
            push = self._open(request_id, streams=False)
        push.delegated = push.delegated or PostedWrite(-1, [])
        push.delegated.parts.append(part)
        push.posting(part.record.t_post)
        push.record.decode_engine_id, push.record.decode_request_id = decode_engine_id, decode_request_id
        if self._trace.enabled:
            push.record.writes.append(part.record)

    def drain(self, seconds: float, listen: Callable[[], None] = lambda: None) -> int:
        """Wait for what is on the wire, for shutdown. ``listen`` hands on what was unpacked. Returns how
        many WRITEs had to be left behind.
        """
        deadline = time.perf_counter() + seconds
        while any(push.in_flight for push in self._pushes.values()) and time.perf_counter() < deadline:
            listen()
            self._poll()
            time.sleep(WRITE_POLL_S)
        left = [part for push in self._pushes.values() for part in push.parts]
        for part in left:
            self._outbox.release(part)
        return len(left)

    def _absorb(self) -> None:
        self._absorb_revoked()
        for event, at in self._step_events.take():
            if isinstance(event, Armed):
                self._begin_step(event, at)
            elif isinstance(event, LayerSaved):
                self._pace.layer_ready(at)
                if event.layer not in self._step_layers:
                    self._layer_ready(event.layer, at, hooked=True)
            else:
                for layer in range(len(self._layer_groups)):
                    if layer not in self._step_layers:
                        self._layer_ready(layer, at, hooked=False)
                self._step, self._swept = [], self._current
        for done in self._step_events.done(self._swept):
            if not self._step_events.is_void(done.request_id, done.step):
                self.finished(done.request_id, done.blocks)
        self._step_events.forget_void()

    def _begin_step(self, event: Armed, at: float) -> None:
        self._absorb_revoked()
        self._current = event.step
        self._step, self._step_layers = [], set()
        self._pace.step_begins()
        for chunk in event.chunks:
            if self._step_events.is_void(chunk.request_id, event.step):
                continue
            push = self._pushes.get(chunk.request_id)
            if push is None:
                if chunk.index > 0:
                    continue
                push = self._open(chunk.request_id, chunk.streams, chunk.mode)
            self._dispatch(push, Planned(chunk))
            push.planned(chunk, event.step, at)
            self._step.append((push, chunk))
            if push.session.state is State.WAITING:
                registration = self._host.take_registration(push.request_id)
                if registration is not None:
                    self._registered(push, registration)

    def _layer_ready(self, layer: int, at: float, *, hooked: bool) -> None:
        self._step_layers.add(layer)
        for push, chunk in self._step:
            if push.session.accepts(Ready):
                push.record.ready_at(chunk.index, layer, at, hooked, keep=self._trace.enabled)
                self._dispatch(push, Ready(chunk.epoch, chunk.index, layer))

    def _poll(self) -> None:
        self._outbox.release_leftovers(time.perf_counter(), RELEASE_RETRY_S)
        for push in list(self._pushes.values()):
            if not push.in_flight:
                continue
            try:
                for event in self._flight.poll(push):
                    self._dispatch(push, event)
                self._end_overdue(push)
            except Exception as error:  # noqa: BLE001  a transport that breaks its contract ends this push, not all
                self._fail(push, f"{type(error).__name__}: {error}")

    def _end_overdue(self, push: Push) -> None:
        """A WRITE that stays on the wire for too long ends the push, but only its own end frees what it touches."""
        reason = self._flight.overdue(push)
        if reason is None:
            return
        session = push.session
        if push.delegated is not None and session.registration is not None:
            self._host.retract(Retract(session.registration, session.epoch, reason, False), withdrawn=push.withdrawn)
        self._fail(push, reason)
