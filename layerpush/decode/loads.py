"""The loads of one decode rank, by request.

A load begins when the engine registers a request (``register``), and is over when no prefill rank can write into the
request's blocks. ``load_session`` has its states.

Ownership:

- ``Loads`` owns the open loads and the messages that came before their registration. It finds the load of a message or
  an event, and removes a load whose session is closed.
- ``Load`` owns the session of one request, its record, and its completions. It performs the session's actions.
- ``PrefillPeers`` knows the agents: which of them live, and which are layerpush ranks.
- ``Outcomes`` owns the outcomes that are still to be reported to the engine.

The writer thread calls everything here, but for ``engines_in_use`` and ``len``. ``register``, ``abort`` and
``time_out`` are tasks from the main thread; messages come from ``Inbox``. ``tick`` follows every round of
tasks and messages: it gives sessions the time, and delivers outcomes to vLLM's inboxes.

A completion takes this way: ``Inbox`` -> ``Loads.on_message`` -> ``Load.on_message`` -> ``LoadSession`` ->
``Outcomes.report_ended``; then, in the same turn of the writer, ``Loads.tick`` -> ``Outcomes.tick`` ->
``VllmPushWorker.loaded``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from layerpush.core.wire import (
    Cancelled,
    Completed,
    Completion,
    Decline,
    Fail,
    FirstToken,
    PrefixLanded,
    Queued,
    Registration,
    Unregistered,
    encode_registration,
)
from layerpush.decode.checks import Checks
from layerpush.decode.deadlines import Deadlines
from layerpush.decode.early_messages import EarlyMessage, EarlyMessages, LoadMessage
from layerpush.decode.load import Load
from layerpush.decode.load_protocol import Aborted, Event, GaveWay, State, TimedOut
from layerpush.decode.load_session import LoadSession
from layerpush.decode.outcomes import Outcomes
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.peers import Address

if TYPE_CHECKING:
    from layerpush.compat.push_worker import VllmPushWorker

OUTCOME_POLL_S = 1e-3
"""Nothing reports that vLLM's main thread knows a request by now."""

logger = logging.getLogger(f"vllm.{__name__}")


class Loads:
    """See the module's text. A failed load waits for answers to its ``Cancel`` for ``cancel_timeout_s`` seconds.

    Without ``checks`` this rank does not compare what has landed.
    """

    def __init__(
        self,
        worker: VllmPushWorker,
        cancel_timeout_s: float,
        peers: PrefillPeers,
        outcomes: Outcomes,
        peer_errors: PeerErrors,
        checks: Checks | None = None,
    ) -> None:
        self.peers = peers
        self._worker = worker
        self._cancel_timeout_s = cancel_timeout_s
        self._peer_errors = peer_errors
        self._open: dict[str, Load] = {}
        self._deadlines = Deadlines()
        self._early = EarlyMessages()
        self._outcomes = outcomes
        self._checks = checks

    def __len__(self) -> int:
        return len(self._open)

    @property
    def engines_in_use(self) -> set[str]:
        """Prefill engines that loads are awaited from. Any thread."""
        return {load.address.engine_id for load in list(self._open.values())}

    def next_due(self, now: float) -> float | None:
        """When ``tick`` has something to do, unless a message or an event comes first; None: not before."""
        times = (
            now + OUTCOME_POLL_S if self._outcomes else None,
            self._deadlines.soonest,
            self.peers.next_due(now),
            self._early.expires_at,
        )
        return min((at for at in times if at is not None), default=None)

    # From the engine.

    def register(self, registration: Registration, address: Address, extra: dict[str, Any], now: float) -> None:
        """Register with a prefill engine; ``extra`` keys go along for stock engines. Raises ``WireError``."""
        request_id = registration.request_id
        if request_id in self._open:
            self.refuse(
                request_id, "an earlier request of the same id still has blocks that somebody may write to", now
            )
            return
        payload = encode_registration(registration, **extra)
        record = self._record(request_id, now)
        record.prefill_request_id, record.prefill_engine_id = registration.prefill_request_id, address.engine_id
        record.blocks = registration.blocks
        session = LoadSession(request_id, self._cancel_timeout_s, self._worker.world_size)
        load = self._open[request_id] = Load(
            registration, payload, address, session, record, self._worker, self.peers, self._outcomes, self._checks
        )
        self._act(load, partial(load.register, self._on_registered, now), now)

    def refuse(self, request_id: str, reason: str, now: float) -> None:
        """The request cannot be registered."""
        self._outcomes.report_ended(self._record(request_id, now), "refused", reason, now)
        logger.error("KV load of %s failed: %s", request_id, reason)

    def abort(self, request_id: str, reason: str, now: float) -> None:
        """The engine aborted the request; it holds the blocks until the load is reported as over."""
        self._handle(request_id, Aborted(reason), now)

    def unregister(self, request_id: str, now: float) -> None:
        """The engine needs the blocks, and will register the request again. A load that P has begun goes on."""
        self._handle(request_id, GaveWay(), now)

    def time_out(self, request_id: str, reason: str, now: float) -> None:
        """The request has waited for too long."""
        self._handle(request_id, TimedOut(reason), now)

    # From prefill engines.

    def on_message(self, sender: str, message: LoadMessage, payload: bytes, now: float) -> None:
        """A message about a load, and the notification that it came in."""
        self.peers.on_message(sender, now, speaks_layerpush=not isinstance(message, Completion))
        self._on_message(sender, message, payload, now)

    def on_invisible(
        self, sender: str, message: Completion | Completed, payload: bytes, reason: str, now: float
    ) -> None:
        """The bytes of a completed push have landed, but this device may not see them: nothing may read them. The load
        fails; the completion's sender writes no more.
        """
        self.peers.on_message(sender, now, speaks_layerpush=False)
        self._on_message(sender, Fail(message.request_id, 0, reason, drained=True), payload, now)

    def _on_message(self, sender: str, message: LoadMessage, payload: bytes, now: float) -> None:
        load = self._open.get(message.request_id)
        if load is None or load.session.is_unsent:
            if load is None and isinstance(message, FirstToken):
                return  # the load is over, so its token is of no use
            if not isinstance(message, Cancelled | PrefixLanded | Queued | Unregistered):
                self._dropped(self._early.keep(sender, message, payload, now), now)
        elif sender not in load.session.agents:
            text = f"agent {sender} reports on {message.request_id}, which is not registered with it"
            self._peer_errors.count("foreign status", text, now)
        elif isinstance(message, FirstToken) and load.registration.sampling is None:
            text = f"agent {sender} sends a first token for {message.request_id}, which has not asked for it"
            self._peer_errors.count("foreign status", text, now)
        else:
            self._act(load, partial(load.on_message, sender, message, payload, now), now)

    def on_pong(self, sender: str, now: float) -> None:
        """An agent answers a ping: it lives."""
        self.peers.on_message(sender, now, speaks_layerpush=True)

    def decline(self, address: Address, message: Decline) -> None:
        """Report to a prefill engine that this engine will not load a request."""
        self.peers.decline(address, message)

    # Time.

    def tick(self, now: float) -> None:
        """Give sessions the time, ask prefill engines for signs of life, and deliver outcomes."""
        for load in [self._open[request_id] for request_id in self._deadlines.due(now)]:
            self._act(load, partial(load.tick, now), now)
        for agent, event in self.peers.tick(self._open, now):
            for request_id, load in list(self._open.items()):
                if agent in load.session.agents:
                    self._handle(request_id, event, now)
        self._dropped(self._early.expire(now), now)
        self._outcomes.tick(now)

    def _dropped(self, messages: Sequence[EarlyMessage], now: float) -> None:
        for early in messages:
            if isinstance(early.message, Completion | Completed):
                text = f"agent {early.sender} completes {early.message.request_id}, which does not wait"
                self._peer_errors.count("late completion", text, now)

    def _on_registered(self, load: Load, events: Sequence[Event], now: float) -> None:
        request_id = load.session.request_id
        for event in events:
            self._handle(request_id, event, now)
        for early in self._early.drop([request_id]) if load.session.agents else ():
            self.peers.on_message(early.sender, now, speaks_layerpush=early.speaks_layerpush)
            self._on_message(early.sender, early.message, early.payload, now)

    def _handle(self, request_id: str, event: Event, now: float) -> None:
        load = self._open.get(request_id)
        if load is not None:
            self._act(load, partial(load.handle, event, now), now)

    def _act(self, load: Load, act: Callable[[], None], now: float) -> None:
        """A defect fails this load and no other: its agents are asked to stop, and their answers free its blocks."""
        try:
            act()
        except Exception as error:  # a defect of ours: this load cannot go on
            logger.exception("layerpush: a defect ends the load of %s", load.session.request_id)
            if load.session.accepts(TimedOut):
                load.handle(TimedOut(f"{type(error).__name__}: {error}"), now)
            load.report(now)
        finally:
            self._changed(load, now)

    def _changed(self, load: Load, now: float) -> None:
        """Note when the load is due next, and remove it if it is closed and its end is reported."""
        request_id = load.session.request_id
        if self._open.get(request_id) is not load:
            return
        due = load.session.next_due(now) if load.unreported is None else now + OUTCOME_POLL_S
        self._deadlines.set(request_id, due)
        if load.session.state is State.CLOSED and load.unreported is None:
            del self._open[request_id]
            self.peers.release_agents(load.address.engine_id, load.session.agents)

    def _record(self, request_id: str, now: float) -> LoadRecord:
        return LoadRecord(request_id=request_id, engine_id=self._worker.engine_id, t_awaited=now)
