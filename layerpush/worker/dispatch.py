"""What arrives from other engines over NIXL, and who of P's and D's desks it is for. Writer thread only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from layerpush.core.wire import (
    Accepted,
    Cancel,
    Cancelled,
    Completion,
    Fail,
    Heartbeat,
    Ping,
    Pong,
    Registration,
    Unpack,
    Unpacked,
    WireError,
    read,
)
from layerpush.decode.loads import Loads
from layerpush.prefill.registrations import Registrations
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.base import Transport, TransportError


class Answers(Protocol):
    """Who hears what decode ranks have unpacked."""

    def unpacked(self, agent: str, message: Unpacked) -> None: ...


class Dispatcher:
    """``guarded(what, call)`` calls, and survives what goes wrong with one message; ``heartbeat`` is upstream's."""

    def __init__(
        self,
        transport: Transport,
        registrations: Registrations,
        loads: Loads,
        answers: Answers,
        heartbeat: Callable[[bytes], None],
        peer_errors: PeerErrors,
        guarded: Callable[[str, Callable[[], None]], object],
    ) -> None:
        self._transport = transport
        self._registrations = registrations
        self._loads = loads
        self._answers = answers
        self._heartbeat = heartbeat
        self._peer_errors = peer_errors
        self._guarded = guarded

    def deliver(self) -> None:
        """Everything that has arrived. What cannot be read is complained of and dropped."""
        for agent, payload in self._arrived():
            try:
                message = read(payload)
            except WireError as error:
                self._complain("bad notification", f"what agent {agent} sent is dropped: {error}")
                continue
            self._guarded(f"{type(message).__name__} from {agent}", partial(self._hand_over, agent, message, payload))

    def deliver_answers(self) -> None:
        """What decode ranks have unpacked, and nothing else: nothing new is begun at shutdown."""
        for agent, payload in self._arrived():
            with contextlib.suppress(WireError):
                message = read(payload)
                if isinstance(message, Unpacked):
                    self._answers.unpacked(agent, message)

    def _hand_over(self, agent: str, message: Any, payload: bytes) -> None:
        now = time.perf_counter()
        match message:
            case Registration():
                self._registrations.registered(agent, message, now)
            case Cancel():
                self._registrations.cancelled(agent, message, now)
            case Ping():
                self._registrations.pinged(agent, message)
            case Heartbeat():
                self._heartbeat(payload)
            case Pong():
                self._loads.heard(agent, None, now)
            case Unpacked():
                self._answers.unpacked(agent, message)
            case Accepted() | Fail() | Cancelled() | Completion() | Unpack():
                self._loads.heard(agent, message, now)

    def _arrived(self) -> list[tuple[str, bytes]]:
        try:
            return self._transport.notifications()
        except TransportError as error:
            self._complain("notifications", f"NIXL notifications cannot be read (it goes on trying): {error}")
            return []

    def _complain(self, kind: str, text: str) -> None:
        self._peer_errors.add(kind, text, time.perf_counter())
