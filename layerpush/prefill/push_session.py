"""One push as a state machine: ``(state, event) -> state, actions``. No I/O, no clock, no threads.

A session follows one request on one prefill rank, from its first planned chunk until D knows the outcome and the
scheduler has released the request. Only ``Push`` calls it. Only the session writes its fields.
The tables in ``push_protocol`` have the events that each state accepts.

Four phases, in the order of a push that goes well:

- Nothing is posted: ``WAITING`` for D's registration, ``CONNECTING`` to D. A whole push stays ``DEFERRED``.
- Blocks go by layer or chunk: ``STREAMING``. After a preemption the session is ``REWINDING`` until the old epoch's
  WRITEs have ended, and starts anew. So it is if vLLM takes a step back. If it still may, the session is
  ``UNCONFIRMED``. ``NOTIFYING`` sends D the completion; ``NOTIFIED`` has sent it.
- Or vLLM pushes the request whole: ``WHOLE``, and ``WRITING_WHOLE`` while its WRITEs are on the wire. If the block
  sizes differ, vLLM cannot: all layers go at once, from ``WHOLE`` by ``STREAMING``.
- The end: ``CLOSED``. A push that fails is ``DRAINING`` until its WRITEs have ended. It is ``ABANDONED`` after that, if
  the scheduler has not finished the request yet.

``in_flight`` holds each WRITE that may touch memory, vLLM's as ``WHOLE``. ``outcome`` and ``failure`` are set once.
Three facts are not states, because each goes with most states: ``_finished`` (the scheduler holds the blocks under a
lease), ``_dropped`` (it has taken them back) and ``_cancelled`` (D wants its blocks back). They decide the last state,
in ``_end_without_completion``.

The first token that P has sampled comes with ``Finished``. It goes to D at once, or as soon as D registers, whether or
not WRITEs are in flight. The completion never waits for it (``_send_first_token``).

The invariants, each with the method or state that enforces it:

- a block is posted once an epoch and only after its layer is ready (``_on_post_ready``);
- a block of a prefix that D was told of is never posted again, in any epoch (``_restart``), and D is told of none of a
  request whose steps vLLM may take back (``_prefix``);
- after a preemption nothing is posted before every WRITE of the old epoch has ended (``REWINDING``);
- D gets one completion, and only with full coverage (``_settle``);
- D gets it only after vLLM has accepted every step of the prompt, if it may take one back (``UNCONFIRMED``);
- a push that failed, was aborted or cancelled ends only after its WRITEs have ended (``DRAINING``), and only then
  reports that it has drained (``_end_without_completion``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from layerpush.core.first_token import Sampled
from layerpush.core.machine import IllegalTransitionError, Machine
from layerpush.core.push_mode import MAX_IN_FLIGHT, PushMode
from layerpush.core.wire import Registration
from layerpush.core.write import WHOLE, Write
from layerpush.prefill import push_protocol
from layerpush.prefill.coverage import Coverage, CoverageError
from layerpush.prefill.push_protocol import (
    IGNORED,
    TRANSITIONS,
    Action,
    Connect,
    Event,
    Notify,
    Outcome,
    Post,
    PushWhole,
    Release,
    ReportFailure,
    ReportPrefix,
    ReportRewind,
    SendFirstToken,
    State,
)
from layerpush.prefill.ready_blocks import ReadyBlocks

S = State


class PushSession(Machine[State, Event, Action]):
    """See the module's text. ``layer_groups`` and ``layer_bytes`` hold each layer's KV cache group and block size."""

    TRANSITIONS: ClassVar = TRANSITIONS
    IGNORED: ClassVar = IGNORED

    def __init__(
        self,
        request_id: str,
        layer_groups: Sequence[int],
        layer_bytes: Sequence[int],
        mode: PushMode,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        super().__init__(request_id, State.WAITING)
        self.registration: Registration | None = None
        self.outcome: Outcome = "pending"
        self.failure: str | None = None
        self.epoch = 0
        self.in_flight: dict[int, Write] = {}
        self.mode = mode
        self.landed_bytes = self.posted_bytes = 0
        """Bytes of this epoch: those that have landed, and those that were posted."""
        self._ready_blocks = ReadyBlocks(layer_groups, layer_bytes, by_layer=mode.by_layer)
        self._layers = len(layer_groups)
        self._max_in_flight = max_in_flight
        self._writes = 0
        self._coverage: Coverage | None = None
        self._unreported = 0
        """The first chunk of this epoch that D was not told of."""
        self._was_provisional = False
        self._sampled: Sampled | None = None
        self._finished = self._dropped = self._cancelled = False  # as states, they would double most of the table
        self._provisional = False
        """Whether vLLM may take back a step of the prompt."""
        self._recomputes = False
        """Whether the scheduler computes the prompt again after the completion."""
        self._void = False
        """Whether the push has failed so that D may not keep what it was told of."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes that D gets of the newest chunk. 0 before D has registered."""
        return self._ready_blocks.chunk_bytes

    @property
    def unposted_bytes(self) -> int:
        """Bytes of all planned chunks that are not posted. 0 before D has registered."""
        return self._ready_blocks.planned_bytes - self.posted_bytes

    @property
    def next_part(self) -> float:
        """The expected size of the next chunk, as a part of the newest chunk's: 0 to 1, 0 after the prompt's last."""
        return self._ready_blocks.next_part

    @property
    def ready_blocks(self) -> ReadyBlocks:
        """The blocks of this epoch. For reading only."""
        return self._ready_blocks

    def _on_planned(self, event: push_protocol.Planned, actions: list[Action]) -> State:
        chunk = event.chunk
        if self.state is S.NOTIFIED:
            if chunk.epoch != self.epoch:
                self._report_rewind(actions)
            return self.state
        state = self.state if chunk.epoch == self.epoch else self._restart(chunk.epoch)
        self._ready_blocks.plan(chunk)
        self._provisional = chunk.provisional
        self._was_provisional |= chunk.provisional  # another connector may report a lost block too late
        return state

    def _on_ready(self, event: push_protocol.Ready, _: list[Action]) -> State:
        if event.epoch == self.epoch and event.chunk < self._ready_blocks.chunks:
            self._ready_blocks.ready(event.chunk, event.layer)
        return self.state

    def _on_post_ready(self, event: push_protocol.PostReady, actions: list[Action]) -> State:
        may_split = self.mode.by_layer and not event.wait
        has_room = len(self.in_flight) < self._max_in_flight
        if has_room and (may_split or self._ready_blocks.has_whole_chunk):
            self._post_pending(actions)
        return self._settle(actions)

    def _on_registered(self, event: push_protocol.Registered, actions: list[Action]) -> State:
        if self.registration is not None:
            raise IllegalTransitionError(f"{self.request_id}: registered twice")
        self.registration = event.registration
        if self.state is S.WHOLE:
            self._send_first_token(actions)
            actions.append(PushWhole(event.registration))
            return S.WHOLE
        if self.mode is PushMode.WHOLE:
            return S.DEFERRED
        actions.append(Connect(event.registration))
        return S.CONNECTING

    def _on_connected(self, event: push_protocol.Connected, _: list[Action]) -> State:
        assert self.registration is not None
        if event.whole is not None:
            self._ready_blocks.rewind()
            self._ready_blocks.plan(event.whole)
            for layer in range(self._layers):
                self._ready_blocks.ready(event.whole.index, layer)
        self._ready_blocks.align(self.registration.local_block_ids, event.replicas, event.pieces)
        self._coverage = Coverage(self._ready_blocks.wanted, self._ready_blocks.kept)
        return S.STREAMING

    def _on_link_refused(self, _: push_protocol.LinkRefused, actions: list[Action]) -> State:
        if not self._finished:
            return S.DEFERRED
        actions.append(PushWhole(self.registration))
        return S.WHOLE

    def _on_landed(self, event: push_protocol.WriteLanded, actions: list[Action]) -> State:
        write = self.in_flight.pop(event.write)
        if self.state is S.DRAINING:
            return self._end_without_completion(actions)
        if self.state is S.WRITING_WHOLE:
            self._conclude("completed")
            return self._release(actions)
        if self.state is S.REWINDING:
            return self.state if self.in_flight else S.STREAMING
        assert self._coverage is not None
        self.landed_bytes += write.size
        for part in write.segments:
            self._coverage.land(part.layers, part.first - part.skipped, part.end - part.skipped)
        state = self._settle(actions)
        if state is S.STREAMING:
            actions += self._prefix()
        return state

    def _on_prefix_reported(self, event: push_protocol.PrefixReported, _: list[Action]) -> State:
        self._ready_blocks.keep(event.chunk)
        return self.state

    def _on_lost(self, event: push_protocol.WriteLost, actions: list[Action]) -> State:
        self.in_flight.pop(event.write)
        return self._fail(event.reason, actions)

    def _on_failed(self, event: push_protocol.Failed, actions: list[Action]) -> State:
        self._void = event.void
        return self._fail(event.reason, actions)

    def _on_cancelled(self, _: push_protocol.CancelledByD, actions: list[Action]) -> State:
        self._cancelled = True
        self._conclude("cancelled", "the decode engine cancelled its registration")
        return self._end_without_completion(actions)

    def _on_notified(self, _: push_protocol.Notified, actions: list[Action]) -> State:
        self._conclude("completed")
        return self._release(actions) if self._finished else S.NOTIFIED

    def _on_whole_posted(self, _: push_protocol.WholePosted, __: list[Action]) -> State:
        self.in_flight[WHOLE.id] = WHOLE
        return S.WRITING_WHOLE

    def _on_preempted(self, _: push_protocol.Preempted, __: list[Action]) -> State:
        if self.state is S.NOTIFIED:
            self._recomputes = True  # the same tokens: D has the right KV
            return self.state
        return self._restart(self.epoch + 1)

    def _on_rewound(self, _: push_protocol.Rewound, actions: list[Action]) -> State:
        if self.state is S.NOTIFIED:
            self._report_rewind(actions)
            return self.state
        if self._ready_blocks.kept_tokens and self._ready_blocks.chunks and not self._was_provisional:
            raise CoverageError(f"{self.request_id}: vLLM took back steps that the decode engine may have kept")
        return self._restart(self.epoch + 1)

    def _on_accepted(self, _: push_protocol.ResultsAccepted, actions: list[Action]) -> State:
        self._provisional = False
        return self._settle(actions) if self.state is S.UNCONFIRMED else self.state

    def _on_finished(self, event: push_protocol.Finished, actions: list[Action]) -> State:
        self._finished, self._sampled = True, event.sampled
        self._send_first_token(actions)
        if self.state in (S.WAITING, S.DEFERRED):
            actions.append(PushWhole(self.registration))
            return S.WHOLE
        if self.state in (S.NOTIFIED, S.ABANDONED):
            return self._release(actions)
        return self._settle(actions) if self.state is S.UNCONFIRMED else self.state

    def _on_dropped(self, event: push_protocol.Aborted | push_protocol.LeaseExpired, actions: list[Action]) -> State:
        self._dropped = True
        self._conclude("cancelled" if isinstance(event, push_protocol.Aborted) else "failed", event.reason)
        return S.CLOSED if self.state in (S.NOTIFIED, S.ABANDONED) else self._end_without_completion(actions)

    def _send_first_token(self, actions: list[Action]) -> None:
        """After ``Finished``, if D has registered and asks for the token."""
        registration = self.registration
        if registration is not None and registration.sampling is not None and self.failure is None:
            sampled = self._sampled
            token = None if sampled is None else sampled.for_request(registration.sampling)
            other = () if sampled is None or token is not None else sampled.differing(registration.parameters)
            actions.append(SendFirstToken(registration, token, other))

    def _post_pending(self, actions: list[Action]) -> None:
        segments = self._ready_blocks.pending()
        if not segments:
            return
        size = self._ready_blocks.size(segments)
        self.posted_bytes += size
        self._ready_blocks.take_pending()
        assert self._coverage is not None
        for part in segments:
            self._coverage.post(part.layers, part.first - part.skipped, part.end - part.skipped)
        write = Write(self._writes, self.epoch, self._ready_blocks.chunks - 1, size, segments)
        self._writes += 1
        self.in_flight[write.id] = write
        actions.append(Post(write))

    def _settle(self, actions: list[Action]) -> State:
        if self.in_flight or not self._ready_blocks.is_complete or self._ready_blocks.pending():
            return S.STREAMING
        assert self._coverage is not None
        assert self.registration is not None
        if not self._coverage.full:
            raise CoverageError(f"{self.request_id}: every WRITE landed but not every block is covered")
        if self._provisional and not self._finished:
            return S.UNCONFIRMED
        actions.append(Notify(self.registration))
        return S.NOTIFYING

    def _prefix(self) -> Iterator[Action]:
        """Tell D of the chunks that have landed as a whole, if it asks for that. The last one has the completion."""
        assert self._coverage is not None
        assert self.registration is not None
        blocks = self._ready_blocks
        if not self.registration.number or self._was_provisional:
            return
        for chunk in reversed(range(self._unreported, blocks.chunks - blocks.has_last_chunk)):
            tokens, size, counts = blocks.up_to(chunk)
            if self.landed_bytes >= size and self._coverage.has_landed(counts):
                self._unreported = chunk + 1
                if tokens > blocks.kept_tokens and any(counts):
                    yield ReportPrefix(self.registration, chunk, tokens)
                return

    def _restart(self, epoch: int) -> State:
        self.epoch, self._unreported = epoch, 0
        self.landed_bytes = self.posted_bytes = 0
        self._ready_blocks.rewind()
        if self._coverage is not None:
            self._coverage = Coverage(self._ready_blocks.wanted, self._ready_blocks.kept)
            self.landed_bytes = self.posted_bytes = self._ready_blocks.kept_bytes
        if self.state is S.STREAMING and self.in_flight:
            return S.REWINDING
        return S.STREAMING if self.state in (S.UNCONFIRMED, S.NOTIFYING) else self.state

    def _report_rewind(self, actions: list[Action]) -> None:
        """Once, and only for the steps that the completion rests on."""
        if not self._recomputes:
            self._recomputes = True
            assert self.registration is not None
            actions.append(ReportRewind(self.registration))

    def _fail(self, reason: str, actions: list[Action]) -> State:
        if self.in_flight and self.outcome == "pending":
            self._report(reason, actions, drained=False)
        self._conclude("failed", reason)
        return self._end_without_completion(actions)

    def _conclude(self, outcome: Outcome, failure: str | None = None) -> None:
        """Set the outcome, unless it is set."""
        if self.outcome == "pending":
            self.outcome, self.failure = outcome, failure

    def _end_without_completion(self, actions: list[Action]) -> State:
        """DRAINING while a WRITE is in flight; then the last report."""
        if self.in_flight:
            return S.DRAINING
        self._report(self.failure or "", actions, drained=True)
        if self._dropped:
            return S.CLOSED
        return self._release(actions) if self._finished else S.ABANDONED

    def _report(self, reason: str, actions: list[Action], *, drained: bool) -> None:
        if self.registration is not None:
            actions.append(ReportFailure(self.registration, self.epoch, reason, drained, self._cancelled, self._void))

    def _release(self, actions: list[Action]) -> State:
        actions.append(Release())
        return S.CLOSED

    HANDLERS: ClassVar = {
        push_protocol.Planned: _on_planned,
        push_protocol.Ready: _on_ready,
        push_protocol.PostReady: _on_post_ready,
        push_protocol.Registered: _on_registered,
        push_protocol.Connected: _on_connected,
        push_protocol.LinkRefused: _on_link_refused,
        push_protocol.WriteLanded: _on_landed,
        push_protocol.WriteLost: _on_lost,
        push_protocol.PrefixReported: _on_prefix_reported,
        push_protocol.Failed: _on_failed,
        push_protocol.CancelledByD: _on_cancelled,
        push_protocol.Notified: _on_notified,
        push_protocol.WholePosted: _on_whole_posted,
        push_protocol.Preempted: _on_preempted,
        push_protocol.Rewound: _on_rewound,
        push_protocol.ResultsAccepted: _on_accepted,
        push_protocol.Finished: _on_finished,
        push_protocol.Aborted: _on_dropped,
        push_protocol.LeaseExpired: _on_dropped,
    }
