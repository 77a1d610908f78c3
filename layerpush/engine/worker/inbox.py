"""Hands each notification of another engine to the part of this worker that handles it. Writer thread only.

    from D     ``Registration``, ``Cancel``, ``Unregister``, ``Decline``               ``Claims``
               ``Heartbeat``                                                           vLLM's main thread
    from P     ``Accepted``, ``FirstToken``, ``PrefixLanded``, ``Completed``, ``Fail``,
               ``Cancelled``, ``Queued``, ``Unregistered``                             ``Loads``
               ``Completion``                                                          ``Loads``, with its notification
    from both  ``Ping``                                                                ``Claims``
               ``Pong``                                                                ``PrefillPeers``, and
                                                                                       ``IdleConnections``

The writer calls ``deliver`` once a turn. A notification that cannot be read is counted, logged and dropped. If a
handler fails, by a defect of ours, so is the notification: what a peer can do once, it can do all day.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from layerpush.core.wire import (
    MAX_ID_CHARS,
    Accepted,
    Cancel,
    Cancelled,
    Completed,
    Completion,
    Decline,
    Fail,
    FirstToken,
    Heartbeat,
    Message,
    Ping,
    Pong,
    PrefixLanded,
    Queued,
    Registration,
    Unregister,
    Unregistered,
    WireError,
    read,
)
from layerpush.decode.loads import Loads
from layerpush.prefill.claims import Claims
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.base import Transport, TransportError
from layerpush.transport.cuda import CudaError
from layerpush.transport.idle_connections import IdleConnections

logger = logging.getLogger(f"vllm.{__name__}")

MESSAGES_PER_TURN = 256
TURN_S = 5e-3
"""Seconds after which a turn takes no other message. The longest legal one takes some 0.1 s by itself."""


class Inbox:
    """``heartbeat`` gets each heartbeat.

    ``flush`` makes WRITEs that landed before a notification visible to our device, or raises ``CudaError``: see
    ``transport.cuda``.
    """

    def __init__(
        self,
        transport: Transport,
        claims: Claims,
        loads: Loads,
        idle: IdleConnections,
        heartbeat: Callable[[Heartbeat], None],
        peer_errors: PeerErrors,
        flush: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._claims = claims
        self._loads = loads
        self._idle = idle
        self._heartbeat = heartbeat
        self._peer_errors = peer_errors
        self._defects = PeerErrors(logger)
        self._flush = flush
        self._waiting: deque[tuple[str, bytes]] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether notifications wait for the next turn."""
        return bool(self._waiting)

    def deliver(self) -> bool:
        """Hand over notifications that have arrived, at most ``MESSAGES_PER_TURN``, and none after ``TURN_S``: pushes
        must go on in a flood. Returns whether there were any.

        One flush is enough for a turn: all that it hands over had arrived before.
        """
        if not self._waiting:
            self._waiting.extend(self._notifications())
        found, until = bool(self._waiting), time.perf_counter() + TURN_S
        flushed, failure = False, None
        for _ in range(min(MESSAGES_PER_TURN, len(self._waiting))):
            agent, payload = self._waiting.popleft()
            now = time.perf_counter()
            message = self._read(agent, payload, now)
            if isinstance(message, Completion | Completed | PrefixLanded) and not flushed:
                flushed, failure = True, self._flushed()
            try:
                if failure is not None and isinstance(message, Completion | Completed):
                    self._loads.on_invisible(agent, message, payload, failure, now)
                elif message is not None and (failure is None or not isinstance(message, PrefixLanded)):
                    self._hand_over(agent, message, payload, now)
            except Exception as error:  # noqa: BLE001  a defect of ours costs one message, never the thread
                self._defects.count("defect", f"{type(message).__name__} from {agent} failed", now, error)
            if time.perf_counter() >= until:
                break
        return found

    def _flushed(self) -> str | None:
        """Make WRITEs that landed visible. Returns the reason of a failure: only the bytes of these WRITEs are lost."""
        try:
            self._flush()
        except CudaError as error:
            failure = f"WRITEs that landed cannot be made visible to the device: {error}"
            self._peer_errors.count("flush", failure, time.perf_counter())
            return failure
        return None

    def _read(self, agent: str, payload: bytes, now: float) -> Message | None:
        try:
            if len(agent) <= MAX_ID_CHARS:
                return read(payload)
            text = f"an agent's name has {len(agent)} characters"
        except WireError as error:
            text = f"a message that agent {agent} sent is dropped: {error}"
        self._peer_errors.count("bad notification", text, now)
        return None

    def _hand_over(self, agent: str, message: Message, payload: bytes, now: float) -> None:
        match message:
            case Registration():
                self._claims.on_registration(agent, message, now)
            case Cancel():
                self._claims.on_cancel(agent, message, now)
            case Unregister():
                self._claims.on_unregister(agent, message, now)
            case Decline():
                self._claims.on_decline(message, now)
            case Ping():
                self._claims.on_ping(agent, message)
            case Heartbeat():
                self._heartbeat(message)
            case Accepted() | FirstToken() | Fail() | Cancelled() | Completion() | Queued() | Unregistered():
                self._loads.on_message(agent, message, payload, now)
            case PrefixLanded() | Completed():
                self._loads.on_message(agent, message, payload, now)
            case Pong():
                self._loads.on_pong(agent, now)
                self._idle.on_pong(agent, now)

    def _notifications(self) -> list[tuple[str, bytes]]:
        try:
            return self._transport.notifications()
        except TransportError as error:
            text = f"NIXL notifications cannot be read (it goes on trying): {error}"
            self._peer_errors.count("notifications", text, time.perf_counter())
            return []
