"""Messages about requests that this decode rank has not registered yet. Writer thread only."""

from __future__ import annotations

from typing import NamedTuple

from layerpush.core.bounded_index import BoundedIndex
from layerpush.core.wire import (
    PEER_PREFIX,
    Accepted,
    Cancelled,
    Completed,
    Completion,
    Fail,
    FirstToken,
    PrefixLanded,
    Queued,
    Unregistered,
)

KEPT_S = 30.0
KEPT = 65536
KEPT_BYTES = 64 << 20

LoadMessage = Accepted | FirstToken | PrefixLanded | Completed | Fail | Cancelled | Completion | Queued | Unregistered
"""The messages of prefill ranks about loads."""


class EarlyMessage(NamedTuple):
    """A message, its sender's agent, the notification of a completion, which vLLM gets as it came, and whether only
    layerpush sends such a notification.
    """

    sender: str
    message: LoadMessage
    payload: bytes
    speaks_layerpush: bool


class EarlyMessages(BoundedIndex[EarlyMessage]):
    """By request. Any rank's registration may start the push for all, so a rank that is a step behind may get messages
    early.
    """

    def __init__(self) -> None:
        super().__init__(KEPT, KEPT_BYTES, KEPT_S)

    def keep(self, sender: str, message: LoadMessage, payload: bytes, now: float) -> list[EarlyMessage]:
        """Keep a message for ``KEPT_S`` seconds. ``payload`` is the notification that it came in. Returns the messages
        that are dropped because they are too old, too many or too large.
        """
        kept = payload if isinstance(message, Completion) else b""
        early = EarlyMessage(sender, message, kept, payload.startswith(PEER_PREFIX))
        return self.add(early, [message.request_id], now)
