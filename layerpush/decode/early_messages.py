"""Messages about requests that this decode rank has not registered yet. Writer thread only."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from layerpush.core.wire import Accepted, Cancelled, Completion, Fail, FirstToken, Queued, Unpack, Unregistered

KEPT_S = 30.0
KEPT = 65536

LoadMessage = Accepted | FirstToken | Fail | Cancelled | Completion | Queued | Unpack | Unregistered
"""The messages of prefill ranks about loads."""


class EarlyMessage(NamedTuple):
    """A message, its sender's agent, its notification, and the time in seconds at which it is dropped."""

    deadline: float
    sender: str
    message: LoadMessage
    payload: bytes


class EarlyMessages:
    """Any rank's registration may start the push for all, so a rank that is a step behind may get messages early."""

    def __init__(self) -> None:
        self._messages: deque[EarlyMessage] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, sender: str, message: LoadMessage, payload: bytes, now: float) -> None:
        """Keep a message for ``KEPT_S`` seconds. ``payload`` is the notification that it came in."""
        self._messages.append(EarlyMessage(now + KEPT_S, sender, message, payload))

    def take(self, request_id: str) -> list[EarlyMessage]:
        """Remove and return the messages about this request, in the order in which they came."""
        taken = [early for early in self._messages if early.message.request_id == request_id]
        if taken:
            self._messages = deque(early for early in self._messages if early.message.request_id != request_id)
        return taken

    def expire(self, now: float) -> list[EarlyMessage]:
        """Remove and return the messages that are too old, and the oldest of more than ``KEPT``."""
        expired = []
        while self._messages and (self._messages[0].deadline <= now or len(self._messages) > KEPT):
            expired.append(self._messages.popleft())
        return expired
