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
from collections.abc import Callable, Iterable, Iterator

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
        """Hand over notifications that have arrived, at most ``MESSAGES_PER_TURN``: pushes must go on in a flood.
        Returns whether there were any.
        """
        batch = self._arrived()
        if not batch:
            return False
        arrived = list(self._read(batch))
        landed = Completion | Completed | PrefixLanded
        failure = self._flushed() if any(isinstance(message, landed) for _, message, _, _ in arrived) else None
        for agent, message, payload, now in arrived:
            try:
                if failure is not None and isinstance(message, Completion | Completed):
                    self._loads.on_invisible(agent, message, payload, failure, now)
                elif failure is None or not isinstance(message, PrefixLanded):
                    self._hand_over(agent, message, payload, now)
            except Exception as error:  # noqa: BLE001  a defect of ours costs one message, never the thread
                self._defects.count("defect", f"{type(message).__name__} from {agent} failed", now, error)
        return True

    def _flushed(self) -> str | None:
        """Make WRITEs that landed visible. Returns the reason of a failure: only the bytes of these WRITEs are lost."""
        try:
            self._flush()
        except CudaError as error:
            failure = f"WRITEs that landed cannot be made visible to the device: {error}"
            self._peer_errors.count("flush", failure, time.perf_counter())
            return failure
        return None

    def _read(self, batch: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, Message, bytes, float]]:
        for agent, payload in batch:
            now = time.perf_counter()
            if len(agent) > MAX_ID_CHARS:
                self._peer_errors.count("bad notification", f"an agent's name has {len(agent)} characters", now)
                continue
            try:
                yield agent, read(payload), payload, now
            except WireError as error:
                self._peer_errors.count(
                    "bad notification", f"a message that agent {agent} sent is dropped: {error}", now
                )

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

    def _arrived(self) -> list[tuple[str, bytes]]:
        """The next notifications. More are read from NIXL when all that were read are handed over."""
        if not self._waiting:
            self._waiting.extend(self._notifications())
        return [self._waiting.popleft() for _ in range(min(MESSAGES_PER_TURN, len(self._waiting)))]

    def _notifications(self) -> list[tuple[str, bytes]]:
        try:
            return self._transport.notifications()
        except TransportError as error:
            text = f"NIXL notifications cannot be read (it goes on trying): {error}"
            self._peer_errors.count("notifications", text, time.perf_counter())
            return []
