"""The one thread that talks to the transport: feeds sessions with events and executes their actions.

Every method runs on the writer thread. Nothing here knows vLLM: what only the engine's worker can do is behind
``Host``, what arrives from the forward pass comes through ``Capture``.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable

from layerpush.layout import CacheLayout
from layerpush.prefill.capture import Armed, Capture, LayerSaved
from layerpush.prefill.coverage import MismatchError
from layerpush.prefill.fallbacks import LATE_REGISTRATION, SHORT_PROMPT
from layerpush.prefill.flight import Flight
from layerpush.prefill.host import Host, Identity
from layerpush.prefill.outbox import Outbox, PostedWrite, RankWrite
from layerpush.prefill.plan import ChunkPlan
from layerpush.prefill.policy import Policy
from layerpush.prefill.protocol import (
    Aborted,
    Action,
    Connect,
    Connected,
    Delegate,
    Event,
    Evicted,
    Failed,
    Finished,
    Planned,
    Post,
    Pump,
    Ready,
    Refused,
    Registered,
    Release,
    Retract,
    State,
    Tell,
    Told,
    Withdrawn,
)
from layerpush.prefill.push import BlockIds, Push
from layerpush.prefill.session import Session
from layerpush.prefill.stager import Stager
from layerpush.prefill.table import PushTable
from layerpush.stats import PushCounters
from layerpush.trace import PushRecord
from layerpush.tracefile import TraceFile
from layerpush.transport.base import PeerLostError, Transport, TransportError
from layerpush.wire import Registration

logger = logging.getLogger("vllm.layerpush.writer")

FENCE_POLL_S = 100e-6
WRITE_POLL_S = 300e-6
PEER_POLL_S = 1e-3
RELEASE_RETRY_S = 1.0


class PushWriter(PushTable):
    def __init__(
        self,
        identity: Identity,
        layout: CacheLayout,
        policy: Policy,
        transport: Transport,
        capture: Capture,
        host: Host,
        trace: TraceFile,
        write_timeout_s: float = math.inf,
        counters: PushCounters | None = None,
        stager: Stager | None = None,
    ) -> None:
        super().__init__()
        self.counters = counters or PushCounters()
        self._identity = identity
        self._layout = layout
        self._policy = policy
        self._transport = transport
        self._stager = stager
        self._outbox = Outbox(transport, layout, stager)
        self._capture = capture
        self._host = host
        self._trace = trace
        self._flight = Flight(self._outbox, host, self.counters, write_timeout_s)
        self._layer_groups = tuple(layer.group for layer in layout.layers)
        self._step: list[tuple[Push, ChunkPlan]] = []
        self._step_layers: set[int] = set()
        self._current = self._swept = 0
        self._later: deque[tuple[Push, Registration | None]] = deque()

    def turn(self) -> None:
        """Take in what the forward pass reported, see what landed, post what is ready."""
        self._absorb()
        self._poll()
        if self._stager is not None:
            self._stager.turn(quiet=not self._pushes)
        while self._later:
            self._claim(*self._later.popleft())
        for push in list(self._pushes.values()):
            if push.stirred and push.session.state is State.STREAMING:
                push.stirred = False
                self._dispatch(push, Pump())

    @property
    def patience(self) -> float | None:
        """How long the writer may sleep, in seconds, if nobody wakes it; None is for ever."""
        if self._capture.pending:
            return FENCE_POLL_S
        if any(push.in_flight for push in self._pushes.values()):
            return WRITE_POLL_S
        if self._stager is not None and (self._stager.in_flight if self._pushes else self._stager.is_busy):
            return WRITE_POLL_S
        if any(push.awaits_peer for push in self._pushes.values()):
            return PEER_POLL_S
        return RELEASE_RETRY_S if self._outbox.has_leftovers else None

    @property
    def engines_in_flight(self) -> set[str]:
        timed = set() if self._stager is None else self._stager.engines_in_flight
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
        for event, at in self._capture.take():
            if isinstance(event, Armed):
                self._begin_step(event, at)
            elif isinstance(event, LayerSaved):
                if event.layer not in self._step_layers:
                    self._layer_ready(event.layer, at, hooked=True)
            else:
                for layer in range(len(self._layer_groups)):
                    if layer not in self._step_layers:
                        self._layer_ready(layer, at, hooked=False)
                self._step, self._swept = [], self._current
        for done in self._capture.done(self._swept):
            if not self._capture.is_void(done.request_id, done.step):
                self.finished(done.request_id, done.blocks)
        self._capture.forget_void()

    def _absorb_revoked(self) -> None:
        for revoked in self._capture.revoked():
            request_id, event = revoked.request_id, revoked.event
            push = self._pushes.get(request_id)
            if push is None and isinstance(event, Aborted | Evicted):
                if revoked.armed > self._current:
                    push = self._open(request_id, streams=True)  # dropped before its first step was seen: it counts
                else:
                    self._host.ended(request_id, event.reason)
            if push is not None and push.session.accepts(type(event)):
                logger.info("push of %s: %s", request_id, type(event).__name__.lower())
                self._dispatch(push, event)

    def _begin_step(self, event: Armed, at: float) -> None:
        self._absorb_revoked()
        self._current = event.step
        self._step, self._step_layers = [], set()
        for chunk in event.chunks:
            if self._capture.is_void(chunk.request_id, event.step):
                continue
            push = self._pushes.get(chunk.request_id)
            if push is None:
                if chunk.index > 0:
                    continue
                push = self._open(chunk.request_id, chunk.streams)
            self._dispatch(push, Planned(chunk))
            push.planned(chunk, event.step, at)
            self._step.append((push, chunk))
            if push.session.state is State.WAITING:
                registration = self._host.take_registration(push.request_id)
                if registration is not None:
                    self._registered(push, registration)

    def _registered(self, push: Push, registration: Registration) -> None:
        push.record.t_registered = time.perf_counter()
        self._dispatch(push, Registered(registration))

    def _layer_ready(self, layer: int, at: float, *, hooked: bool) -> None:
        self._step_layers.add(layer)
        for push, chunk in self._step:
            if push.session.accepts(Ready):
                push.record.ready_at(chunk.index, layer, at, hooked, keep=self._trace.enabled)
                self._dispatch(push, Ready(chunk.epoch, chunk.index, layer))

    def _open(self, request_id: str, streams: bool) -> Push:
        fallback = self._identity.fallback
        if not streams and self._policy.streams:
            fallback = SHORT_PROMPT
        policy = self._policy if streams else Policy(streams=False)
        session = Session(request_id, self._layer_groups, self._layout.layer_bytes, policy)
        record = PushRecord(
            request_id=request_id,
            engine_id=self._identity.engine_id,
            rank=self._identity.rank,
            mode=self._identity.mode,
            fallback=fallback,
        )
        push = self._pushes[request_id] = Push(session, record)
        self.active += 1
        return push

    def _dispatch(self, push: Push, event: Event) -> None:
        push.stirred |= not isinstance(event, Pump)
        if isinstance(event, Registered):
            push.registered_at = time.perf_counter()
        try:
            actions = push.session.handle(event) if push.session.state is not State.CLOSED else []
            for action in actions:
                _ACTIONS[type(action)](self, push, action)
        except MismatchError as error:
            self._fail(push, str(error))
        except Exception as error:  # a broken invariant or a failing host ends this push, never the writer thread
            logger.exception("push of %s failed on %s", push.request_id, type(event).__name__)
            self._fail(push, f"{type(error).__name__}: {error}")
        self._close_if_over(push)

    def _fail(self, push: Push, reason: str) -> None:
        """End a push for good. What its decode engine hears of it is the session's to say, after the last WRITE."""
        session = push.session
        if session.failure is None and (push.delegated is None or push.delegated.lost is None):
            logger.error(
                "push of %s to %s failed: %s; its completion will not be sent",
                push.request_id,
                push.record.decode_request_id,
                reason,
            )
        if push.delegated is not None:
            push.delegated.lost = push.delegated.lost or reason
        elif session.accepts(Failed):
            for action in session.handle(Failed(reason)):
                _ACTIONS[type(action)](self, push, action)
        elif session.state is not State.CLOSED:
            session.failure = session.failure or reason
        self._close_if_over(push)

    def _close_if_over(self, push: Push) -> None:
        if push.session.state is not State.CLOSED or push.in_flight:
            return
        if self._pushes.pop(push.request_id, None) is None:
            return
        self._account(push)
        self._trace.add(push.record)
        self._host.ended(push.request_id, push.session.failure)

    def _account(self, push: Push) -> None:
        """Count a push that has ended, once."""
        if push.accounted:
            return
        push.accounted = True
        record, session = push.record, push.session
        record.reason = session.failure
        record.outcome = "cancelled" if session.cancelled else "completed" if session.failure is None else "failed"
        self.active -= 1
        self.counters.closed(record, push.exposed_s, push.transfer_s)

    def _connect(self, push: Push, registration: Registration) -> None:
        try:
            link = self._host.connect(push.request_id, registration)
        except Exception as error:  # noqa: BLE001  no handshake, or a host that fails: either way this push cannot go on
            self._fail(push, f"{type(error).__name__}: {error}")
            return
        if link is None:
            return
        push.link = link
        push.window = self._host.window(link, registration)
        if link.refusal is not None:
            push.record.fallback = link.refusal
            self._dispatch(push, Refused(link.refusal))
        else:
            self._dispatch(push, Connected())

    def _do_connect(self, push: Push, action: Connect) -> None:
        push.record.decode_request_id = action.registration.request_id
        push.record.decode_engine_id = action.registration.decode_engine_id
        self._connect(push, action.registration)

    def _do_post(self, push: Push, action: Post) -> None:
        assert push.link is not None
        posted = self._outbox.post(action.write, push.link, push.window)
        if posted.lost is not None:
            self.counters.lost()
        if not posted.parts:
            self._dispatch(push, self._flight.ended(push, posted))
            return
        push.writes.append(posted)
        push.posting(min(part.record.t_post for part in posted.parts))
        if self._trace.enabled:
            push.record.writes.extend(part.record for part in posted.parts)

    def _do_tell(self, push: Push, action: Tell) -> None:
        if self._capture.is_void(push.request_id, push.step):
            self._absorb_revoked()
            return
        assert push.link is not None
        payload = self._host.completion(action.registration)
        try:
            for route in push.link.routes:
                self._transport.notify(route.agent, payload)
        except TransportError as error:
            if isinstance(error, PeerLostError):
                self._host.peer_lost(action.registration.decode_engine_id)
            self._fail(push, f"the completion could not be sent: {error}")
            return
        push.record.t_notified = time.perf_counter()
        self._dispatch(push, Told())

    def _do_delegate(self, push: Push, action: Delegate) -> None:
        record = push.record
        if action.registration is None:
            registration = self._host.take_registration(push.request_id)
            if registration is not None or self._host.is_unwanted(push.request_id):
                self._later.append((push, registration))
            return
        record.decode_request_id = action.registration.request_id
        record.decode_engine_id = action.registration.decode_engine_id
        if record.mode != "request" and record.fallback is None:
            record.fallback = LATE_REGISTRATION
        record.mode = "request"
        self._host.delegate(push.request_id, push.blocks or (), action.registration)

    def _claim(self, push: Push, registration: Registration | None) -> None:
        """A registration was found for a push that upstream is to make, unless the push has ended meanwhile; or None:
        it had come, and was withdrawn.
        """
        if registration is None:
            if push.is_unclaimed:
                self._dispatch(push, Withdrawn())
        elif push.is_unclaimed:
            self._registered(push, registration)
        else:
            reason = push.session.failure or "the prefill request has ended"
            self._host.retract(Retract(registration, push.session.epoch, reason, True), withdrawn=False)

    def _do_retract(self, push: Push, action: Retract) -> None:
        if action.drained and push.delegated is not None:
            push.retraction = action  # upstream's WRITEs are still on the wire
        else:
            self._host.retract(action, withdrawn=push.withdrawn)

    def _do_release(self, push: Push, _: Release) -> None:
        self._account(push)  # first: the engine may stop stepping, and reporting, once it knows
        self._host.release(push.request_id)

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


_ACTIONS: dict[type[Action], Callable[[PushWriter, Push, Action], None]] = {
    Connect: PushWriter._do_connect,  # type: ignore[dict-item]  # each action meets its own method
    Post: PushWriter._do_post,  # type: ignore[dict-item]
    Tell: PushWriter._do_tell,  # type: ignore[dict-item]
    Delegate: PushWriter._do_delegate,  # type: ignore[dict-item]
    Retract: PushWriter._do_retract,  # type: ignore[dict-item]
    Release: PushWriter._do_release,  # type: ignore[dict-item]
}
