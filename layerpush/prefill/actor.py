"""Walks sessions: what each answers to an event is done at once, and what comes of that is the next event.

Every method runs on the writer thread. Nothing here knows vLLM: what only the engine's worker can do is behind
``Host``, what arrives from the forward pass comes through ``Capture``.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from layerpush.core.config import PushMode
from layerpush.core.coverage import MismatchError
from layerpush.core.fallbacks import LATE_REGISTRATION, SHORT_PROMPT
from layerpush.core.layout import CacheLayout
from layerpush.core.push_policy import Policy
from layerpush.core.push_protocol import (
    Aborted,
    Action,
    Connect,
    Connected,
    Delegate,
    Event,
    Evicted,
    Failed,
    Post,
    Pump,
    Refused,
    Registered,
    Release,
    Retract,
    State,
    Tell,
    Told,
    Withdrawn,
)
from layerpush.core.push_session import Session
from layerpush.core.step_plan import ChunkPlan
from layerpush.core.wire import Registration
from layerpush.prefill.flight import Flight
from layerpush.prefill.host import Host, Identity
from layerpush.prefill.layer_interval import LayerInterval
from layerpush.prefill.push import Push
from layerpush.prefill.pushes import PushTable
from layerpush.prefill.step_events import StepEvents
from layerpush.telemetry.counters import PushCounters
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import PushRecord
from layerpush.transport.base import PeerLostError, Transport, TransportError
from layerpush.transport.packing.strategy import PackingStrategy
from layerpush.transport.writes import Outbox

logger = logging.getLogger("vllm.layerpush.writer")


class PushActor(PushTable):
    """All that a writer knows, and the moves of a session: open, dispatch, fail, close. ``PushWriter`` has the turn."""

    def __init__(
        self,
        identity: Identity,
        layout: CacheLayout,
        policy: Policy,
        transport: Transport,
        capture: StepEvents,
        host: Host,
        trace: TraceFile,
        write_timeout_s: float = math.inf,
        counters: PushCounters | None = None,
        strategy: PackingStrategy | None = None,
    ) -> None:
        super().__init__()
        self.counters = counters or PushCounters()
        self._identity = identity
        self._layout = layout
        self._policy = policy
        self._transport = transport
        self._strategy = strategy
        self._outbox = Outbox(transport, layout, strategy)
        self._step_events = capture
        self._host = host
        self._trace = trace
        self._flight = Flight(self._outbox, host, self.counters, write_timeout_s)
        self._layer_groups = tuple(layer.group for layer in layout.layers)
        self._step: list[tuple[Push, ChunkPlan]] = []
        self._step_layers: set[int] = set()
        self._current = self._swept = 0
        self._pace = LayerInterval()
        self._later: deque[tuple[Push, Registration | None]] = deque()

    def _open(self, request_id: str, streams: bool, chosen: PushMode | None = None) -> Push:
        """``streams`` False: the scheduler has no blocks to push before prefill ends. ``chosen``: see ``ChunkPlan``."""
        mode, policy = chosen or self._identity.mode, self._policy
        fallback = self._identity.fallback if mode != "request" else None
        if chosen is not None:
            by_key = chosen != "request" and fallback is None
            policy = replace(policy, by_layer=chosen == "layer", streams=by_key)
        if not streams and policy.streams:
            policy, fallback = Policy(streams=False), SHORT_PROMPT
        session = Session(request_id, self._layer_groups, self._layout.layer_bytes, policy)
        record = PushRecord(
            request_id=request_id,
            engine_id=self._identity.engine_id,
            rank=self._identity.rank,
            mode=mode,
            fallback=fallback,
        )
        push = self._pushes[request_id] = Push(session, record)
        self.active += 1
        return push

    def _registered(self, push: Push, registration: Registration) -> None:
        push.record.t_registered = time.perf_counter()
        self._dispatch(push, Registered(registration))

    def _dispatch(self, push: Push, event: Event) -> None:
        push.dirty |= not isinstance(event, Pump)
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
        if self._step_events.is_void(push.request_id, push.step):
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

    def _absorb_revoked(self) -> None:
        for revoked in self._step_events.revoked():
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


_ACTIONS: dict[type[Action], Callable[[PushActor, Push, Action], None]] = {
    Connect: PushActor._do_connect,  # type: ignore[dict-item]  # each action meets its own method
    Post: PushActor._do_post,  # type: ignore[dict-item]
    Tell: PushActor._do_tell,  # type: ignore[dict-item]
    Delegate: PushActor._do_delegate,  # type: ignore[dict-item]
    Retract: PushActor._do_retract,  # type: ignore[dict-item]
    Release: PushActor._do_release,  # type: ignore[dict-item]
}
