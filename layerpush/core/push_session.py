"""One push as a state machine: ``(state, event) -> state, actions``. No I/O, no clock, no threads.

A session follows one request on one prefill rank from its first planned chunk until the decode engine has been
told and the scheduler has let the request go. What may happen when is the table in ``protocol.py``; anything else
raises ``IllegalTransitionError``.

The invariants, each enforced where it matters:

- a block is posted once an epoch and only after its layer is ready (``_pump``);
- after a preemption nothing is posted before every WRITE of the old epoch has ended (``REWINDING``);
- the decode engine is told once, and only with full coverage (``_settle``);
- a session that failed, was aborted or withdrawn ends only after its WRITEs have ended (``DRAINING``), and only then
  says that it has drained (``_retract``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from layerpush.core import push_protocol
from layerpush.core.coverage import Coverage, CoverageError
from layerpush.core.machine import IllegalTransitionError, Machine
from layerpush.core.push_policy import Policy
from layerpush.core.push_protocol import (
    TRANSITIONS,
    Action,
    Connect,
    Delegate,
    Event,
    Post,
    Release,
    Retract,
    State,
    Tell,
    Write,
)
from layerpush.core.ready_blocks import ReadyBlocks
from layerpush.core.wire import Registration

S = State


class Session(Machine[State, Event, Action]):
    """See the module's text. ``layer_groups`` and ``layer_bytes`` hold each layer's KV cache group and block size."""

    TRANSITIONS: ClassVar = TRANSITIONS

    def __init__(
        self, request_id: str, layer_groups: Sequence[int], layer_bytes: Sequence[int], policy: Policy
    ) -> None:
        super().__init__(request_id, State.WAITING)
        self.registration: Registration | None = None
        self.failure: str | None = None
        self.cancelled = False
        self.finished = False
        self.told = False
        self.withdrawn = False
        self.epoch = 0
        self.in_flight: dict[int, Write] = {}
        self._policy = policy
        self._ready_blocks = ReadyBlocks(layer_groups, layer_bytes, by_layer=policy.by_layer)
        self._writes = 0
        self._aligned = False
        self._coverage: Coverage | None = None
        self._dropped = False

    @property
    def all_ready(self) -> bool:
        """Every layer of the whole prompt is in this engine's memory."""
        return self._ready_blocks.is_complete

    def _rewind(self, epoch: int) -> None:
        self.epoch = epoch
        self._ready_blocks.rewind()
        self._cover()

    def _cover(self) -> None:
        if self._aligned:
            self._coverage = Coverage(self._ready_blocks.wanted)

    def _on_planned(self, event: push_protocol.Planned, _: list[Action]) -> State:
        chunk = event.chunk
        state = self.state
        if chunk.epoch != self.epoch and state not in (S.NOTIFIED, S.ABANDONED, S.DRAINING):
            state = self._restart(chunk.epoch)
        if state in (S.NOTIFIED, S.ABANDONED, S.DRAINING):
            return state
        self._ready_blocks.plan(chunk)
        return state

    def _on_ready(self, event: push_protocol.Ready, _: list[Action]) -> State:
        if event.epoch == self.epoch and event.chunk < self._ready_blocks.chunks:
            self._ready_blocks.ready(event.chunk, event.layer)
        return self.state

    def _on_pump(self, _: push_protocol.Pump, actions: list[Action]) -> State:
        if self.state is not S.STREAMING:
            return self.state
        self._pump(actions)
        return self._settle(actions)

    def _on_registered(self, event: push_protocol.Registered, actions: list[Action]) -> State:
        if self.registration is not None:
            raise IllegalTransitionError(f"{self.request_id}: registered twice")
        self.registration = event.registration
        if self.state is S.DELEGATED:
            actions.append(Delegate(event.registration))
            return S.DELEGATED
        if not self._policy.streams:
            return S.DEFERRED
        actions.append(Connect(event.registration))
        return S.CONNECTING

    def _on_connected(self, _: push_protocol.Connected, __: list[Action]) -> State:
        assert self.registration is not None
        self._ready_blocks.align(self.registration.local_block_ids)
        self._aligned = True
        self._cover()
        return S.STREAMING

    def _on_refused(self, _: push_protocol.Refused, actions: list[Action]) -> State:
        if not self.finished:
            return S.DEFERRED
        actions.append(Delegate(self.registration))
        return S.DELEGATED

    def _on_landed(self, event: push_protocol.Landed, actions: list[Action]) -> State:
        write = self.in_flight.pop(event.write)
        if self.state is S.DRAINING:
            return self._drained(actions)
        if self.state is S.REWINDING:
            return self.state if self.in_flight else S.STREAMING
        assert self._coverage is not None
        for part in write.segments:
            skipped = self._ready_blocks.skipped(part.group)
            self._coverage.land(part.layers, part.first - skipped, part.end - skipped)
        return self._settle(actions)

    def _on_lost(self, event: push_protocol.Lost, actions: list[Action]) -> State:
        self.in_flight.pop(event.write)
        return self._fail(event.reason, actions)

    def _on_failed(self, event: push_protocol.Failed, actions: list[Action]) -> State:
        return self._fail(event.reason, actions)

    def _on_withdrawn(self, event: push_protocol.Withdrawn, actions: list[Action]) -> State:
        self.cancelled = self.cancelled or self.failure is None
        self.failure = self.failure or "the decode engine withdrew its registration"
        self.withdrawn = True
        if event.busy:
            return S.DELEGATED
        return S.DRAINING if self.in_flight else self._drained(actions)

    def _on_told(self, _: push_protocol.Told, actions: list[Action]) -> State:
        self.told = True
        return self._release(actions) if self.finished else S.NOTIFIED

    def _on_delivered(self, event: push_protocol.Delivered, actions: list[Action]) -> State:
        if event.lost is None and not self.withdrawn:
            self.told = True
            return self._release(actions)
        self.failure = self.failure or event.lost
        return self._drained(actions)

    def _on_preempted(self, _: push_protocol.Preempted, __: list[Action]) -> State:
        if self.state in (S.NOTIFIED, S.ABANDONED, S.DRAINING):
            return self.state
        return self._restart(self.epoch + 1)

    def _on_finished(self, _: push_protocol.Finished, actions: list[Action]) -> State:
        self.finished = True
        if self.state in (S.WAITING, S.DEFERRED):
            actions.append(Delegate(self.registration))
            return S.DELEGATED
        if self.state in (S.NOTIFIED, S.ABANDONED):
            return self._release(actions)
        return self.state

    def _on_dropped(self, event: push_protocol.Aborted | push_protocol.Evicted, actions: list[Action]) -> State:
        self._dropped = True
        if not self.told and self.failure is None:
            self.cancelled = isinstance(event, push_protocol.Aborted)
            self.failure = event.reason
        if self.in_flight:
            return S.DRAINING
        return S.CLOSED if self.state in (S.NOTIFIED, S.ABANDONED) else self._drained(actions)

    def _pump(self, actions: list[Action]) -> None:
        while len(self.in_flight) < self._policy.max_in_flight:
            segments = self._ready_blocks.pending()
            size = self._ready_blocks.size(segments)
            worth_it = self._policy.by_layer and size >= max(1, self._policy.min_write_bytes)
            if not segments or not (self._ready_blocks.chunk_is_whole or worth_it):
                return
            self._ready_blocks.take()
            assert self._coverage is not None
            for part in segments:
                skipped = self._ready_blocks.skipped(part.group)
                self._coverage.post(part.layers, part.first - skipped, part.end - skipped)
            write = Write(self._writes, self.epoch, self._ready_blocks.chunks - 1, size, segments)
            self._writes += 1
            self.in_flight[write.id] = write
            actions.append(Post(write))

    def _settle(self, actions: list[Action]) -> State:
        if self.in_flight or not self.all_ready or self._ready_blocks.pending():
            return S.STREAMING
        assert self._coverage is not None
        assert self.registration is not None
        if not self._coverage.full:
            raise CoverageError(f"{self.request_id}: every WRITE landed but not every block is covered")
        actions.append(Tell(self.registration))
        return S.NOTIFYING

    def _restart(self, epoch: int) -> State:
        self._rewind(epoch)
        if self.state is S.STREAMING and self.in_flight:
            return S.REWINDING
        return S.STREAMING if self.state is S.NOTIFYING else self.state

    def _fail(self, reason: str, actions: list[Action]) -> State:
        if self.in_flight and self.failure is None:
            self._retract(reason, actions, drained=False)
        self.failure = self.failure or reason
        return S.DRAINING if self.in_flight else self._drained(actions)

    def _drained(self, actions: list[Action]) -> State:
        """No completion will come. With WRITEs still on the wire nothing is said yet."""
        if self.in_flight:
            return S.DRAINING
        self._retract(self.failure or "", actions, drained=True)
        if self._dropped:
            return S.CLOSED
        return self._release(actions) if self.finished else S.ABANDONED

    def _retract(self, reason: str, actions: list[Action], *, drained: bool) -> None:
        if self.registration is not None:
            actions.append(Retract(self.registration, self.epoch, reason, drained))

    def _release(self, actions: list[Action]) -> State:
        actions.append(Release())
        return S.CLOSED

    HANDLERS: ClassVar = {
        push_protocol.Planned: _on_planned,
        push_protocol.Ready: _on_ready,
        push_protocol.Pump: _on_pump,
        push_protocol.Registered: _on_registered,
        push_protocol.Connected: _on_connected,
        push_protocol.Refused: _on_refused,
        push_protocol.Landed: _on_landed,
        push_protocol.Lost: _on_lost,
        push_protocol.Failed: _on_failed,
        push_protocol.Withdrawn: _on_withdrawn,
        push_protocol.Told: _on_told,
        push_protocol.Delivered: _on_delivered,
        push_protocol.Preempted: _on_preempted,
        push_protocol.Finished: _on_finished,
        push_protocol.Aborted: _on_dropped,
        push_protocol.Evicted: _on_dropped,
    }
