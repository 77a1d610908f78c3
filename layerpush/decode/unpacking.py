"""A decode rank that never unpacks: no window is offered, so nothing is packed for it."""

from __future__ import annotations

from layerpush.core.wire import Registration, Unpack
from layerpush.transport.packing.unpacker import Unpacker, UnpackReply


class NoUnpacking:
    """Stands in for an ``Unpacker``, which documents these methods."""

    is_busy = False

    def offer(self, _request_id: str) -> None:
        return None

    def close(self, _request_id: str) -> None:
        return None

    def is_unpacking(self, _request_id: str) -> bool:
        return False

    def on_message(self, agent: str, message: Unpack, _registration: Registration | None) -> UnpackReply:
        return UnpackReply(agent, None, f"agent {agent} packs {message.request_id}, but no window was offered")

    def ended(self) -> tuple[UnpackReply, ...]:
        return ()


Unpacking = Unpacker | NoUnpacking
