"""D's part of packed pushes, with our real unpacker."""

from __future__ import annotations

import time

from bench.pair.end import SCRATCH_BYTES, Cache, End
from layerpush.core.wire import Registration, Unpack, encode
from layerpush.transport.packing.memory import PIECE_BYTES
from layerpush.transport.packing.unpacker import Unpacker, UnpackReply
from layerpush.transport.packing.windows import Windows

WINDOWS = 8
"""Requests that share the ring, as on a worker."""
SETTLE_S = 5.0


class Unpacking:
    """Unpacks the expected requests and answers P."""

    def __init__(self, end: End, cache: Cache) -> None:
        room = (end.ring.numel() - SCRATCH_BYTES) // WINDOWS // PIECE_BYTES * PIECE_BYTES
        windows = Windows(cache.staging.ring, room)
        self._end = end
        self._cache = cache
        self._unpacker = Unpacker(cache.staging, windows, cache.layout, 0, end.ring.data_ptr(), end.device_id)
        self._registrations: dict[str, Registration] = {}

    def expect(self, request_id: str, targets: tuple[int, ...]) -> Registration:
        """The registration of these blocks, with a window if there is one."""
        registration = self._registrations[request_id] = Registration(
            request_id=request_id,
            decode_engine_id="D",
            decode_host="127.0.0.1",
            decode_port=1,
            decode_tp_size=1,
            local_block_ids=(targets,),
            window=self._unpacker.offer(request_id),
        )
        return registration

    def forget(self, request_id: str) -> None:
        """Forget a request: no further WRITE comes for it."""
        del self._registrations[request_id]
        self._unpacker.close(request_id)

    def heard(self, sender: str, message: Unpack) -> None:
        self._send(self._unpacker.on_message(sender, message, self._registrations[message.request_id]))

    def turn(self) -> None:
        for answer in self._unpacker.ended():
            self._send(answer)

    def _send(self, answer: UnpackReply) -> None:
        if answer.error is not None:
            raise ValueError(answer.error)
        if answer.message is not None:
            self._end.transport.notify(answer.agent, encode(answer.message))

    def leftovers(self) -> str | None:
        """The problem if an idle ring is not free, else None."""
        deadline = time.monotonic() + SETTLE_S
        while self._unpacker.is_busy and time.monotonic() < deadline:
            self.turn()
        if self._cache.ring_is_free:
            return None
        return f"{self._cache.staging.ring.used_bytes} bytes of D's ring were not given back"
