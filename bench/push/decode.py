"""D's process: a cache to be written to, our unpacker, and the check of every byte.

A script. Argument: file descriptor of its end of a socket pair with P.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch

from bench.push.end import SCRATCH_BYTES, Cache, End, fill_with_noise, shaped
from bench.push.orders import Check, CheckRest, Expect, Forget, Introduction, Poison, UseCache
from bench.push.points import Draw
from bench.push.settings import POISON, Settings
from layerpush.decode.unpacker import Unpacker
from layerpush.decode.windows import Windows
from layerpush.staging import PIECE_BYTES
from layerpush.wire import Registration, Unpack, Window, encode, read

NOTIFICATION_POLL_S = 1e-3
"""As the writer thread of a worker that awaits something."""
WINDOWS = 8
"""Requests that share the ring, as on a worker."""


class DecodeEnd:
    """``expected`` are the bytes of P's cache, made from the same seed."""

    def __init__(self, commands: Connection, settings: Settings) -> None:
        self._commands = commands
        self._end = End("D", settings)
        self._expected = torch.empty_like(self._end.memory)
        fill_with_noise(self._expected, settings.seed)
        self._pause = NOTIFICATION_POLL_S if settings.polls == "engine" else 0.0
        self._corrupts = settings.corrupt
        self._registrations: dict[str, Registration] = {}
        self._cache: Cache | None = None
        self._expected_slots: list[torch.Tensor] = []

    def introduce(self) -> None:
        end = self._end
        metadata = end.agent.get_agent_metadata()
        self._commands.send(Introduction(metadata, end.memory.data_ptr(), end.ring.data_ptr(), end.device_id))
        other: Introduction = self._commands.recv()
        if digest_of(self._expected) != other.digest:
            raise RuntimeError("the caches of P and D were not made from the same bytes")
        end.agent.add_remote_agent(other.metadata)

    def serve(self) -> None:
        """Until P hangs up."""
        while True:
            self._turn()
            if self._commands.poll(self._pause):
                self._commands.send(self._obey(self._commands.recv()))

    def _turn(self) -> None:
        for sender, payload in self._end.transport.notifications():
            message = read(payload)
            if isinstance(message, Unpack):
                self._unpack(sender, message)
        if self._cache is not None:
            for answer in self._unpacker.ended():
                self._end.transport.notify(answer.agent, encode(answer.message))

    def _unpack(self, sender: str, message: Unpack) -> None:
        answer = self._unpacker.again(sender, message)
        if answer is None:
            self._unpacker.unpack(sender, message, self._registrations[message.request_id])
        else:
            self._end.transport.notify(answer.agent, encode(answer.message))

    def _obey(self, order: object) -> Window | str | None:
        match order:
            case UseCache(block_bytes, layers):
                self._use(block_bytes, layers)
            case Expect(request_id, targets):
                return self._expect(request_id, targets)
            case Forget(request_id):
                del self._registrations[request_id]
                self._unpacker.close(request_id)
            case Poison():
                self._end.ring.fill_(POISON)
            case Check(draw):
                return self._check(draw)
            case CheckRest():
                return self._check_rest()
            case _:
                raise ValueError(order)
        return None

    def _use(self, block_bytes: int, layers: int) -> None:
        end = self._end
        cache = self._cache = end.cache(block_bytes, layers)
        room = (end.ring.numel() - SCRATCH_BYTES) // WINDOWS // PIECE_BYTES * PIECE_BYTES
        windows = Windows(cache.staging.ring, room)
        self._unpacker = Unpacker(cache.staging, windows, cache.layout, 0, end.ring.data_ptr(), end.device_id)
        self._expected_slots = shaped(self._expected, block_bytes, layers)

    def _expect(self, request_id: str, targets: tuple[int, ...]) -> Window | None:
        self._registrations[request_id] = Registration(
            request_id=request_id,
            decode_engine_id="D",
            decode_host="127.0.0.1",
            decode_port=1,
            decode_tp_size=1,
            local_block_ids=(targets,),
        )
        return self._unpacker.offer(request_id)

    def _check(self, draw: Draw) -> str | None:
        """Whether the blocks are P's, and poison them."""
        assert self._cache is not None
        sources, targets = (torch.tensor(ids, device=self._end.device) for ids in (draw.sources, draw.targets))
        if self._corrupts:
            self._cache.slots[0][targets[-1], -1] ^= 0x01
        wrong = 0
        for got, expected in zip(self._cache.slots, self._expected_slots, strict=True):
            here, there = got.index_select(0, targets), expected.index_select(0, sources)
            if not torch.equal(here, there):
                wrong += int((here != there).sum())
            got[targets] = POISON
        return f"{wrong} bytes of D's blocks are not P's" if wrong else None

    def _check_rest(self) -> str | None:
        assert self._cache is not None
        deadline = time.monotonic() + 5.0
        while self._unpacker.is_busy and time.monotonic() < deadline:
            self._turn()
        if not self._cache.is_unused:
            return f"{self._cache.staging.ring.used_bytes} bytes of D's ring were not given back"
        stray = int((self._end.memory != POISON).sum())
        return f"{stray} bytes were written outside D's blocks" if stray else None


def digest_of(memory: torch.Tensor) -> bytes:
    return hashlib.blake2b(memory.cpu().numpy(), digest_size=16).digest()


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands = Connection(descriptor)
    try:
        end = DecodeEnd(commands, commands.recv())
        end.introduce()
        end.serve()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        return  # P is gone, and with it all that D is for


if __name__ == "__main__":
    main(int(sys.argv[1]))
