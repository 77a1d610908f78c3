"""D's process: a cache to be written to, our unpacker, and the check of every byte.

A script. Argument: file descriptor of its end of a socket pair with P.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import torch

from bench.pair.end import Cache, End, digest_of, fill_with_noise, settle, shaped, strays
from bench.pair.meeting import meet_prefill, run_decode
from bench.pair.orders import Expect, Forget, Poison, UseCache
from bench.pair.settings import POISON, Settings
from bench.pair.tables import Draw
from bench.pair.unpacking import Unpacking
from bench.push.orders import Check, CheckRest
from layerpush.core.wire import Registration, Unpack, read

NOTIFICATION_POLL_S = 1e-3
"""As the writer thread of a worker that awaits something."""


class DecodeEnd:
    """``expected`` are the bytes of P's cache, made from the same seed."""

    def __init__(self, commands: Connection, settings: Settings) -> None:
        self._commands = commands
        self._end = End("D", settings)
        self._expected = torch.empty_like(self._end.memory)
        fill_with_noise(self._expected, settings.seed)
        meet_prefill(self._end, commands, digest_of(self._expected))
        self._pause = NOTIFICATION_POLL_S if settings.polls == "engine" else 0.0
        self._corrupts = settings.corrupt
        self._cache: Cache | None = None
        self._unpacking: Unpacking | None = None
        self._expected_slots: list[torch.Tensor] = []

    def serve(self) -> None:
        """Until P hangs up."""
        while True:
            self._turn()
            if self._commands.poll(self._pause):
                answer = self._obey(self._commands.recv())
                settle(self._end.device)
                self._commands.send(answer)

    def _turn(self) -> None:
        for sender, payload in self._end.transport.notifications():
            message = read(payload)
            if isinstance(message, Unpack):
                self._needed.heard(sender, message)
        if self._unpacking is not None:
            self._unpacking.turn()

    @property
    def _needed(self) -> Unpacking:
        assert self._unpacking is not None, "UseCache comes first"
        return self._unpacking

    def _obey(self, order: object) -> Registration | str | None:
        match order:
            case UseCache(block_bytes, layers):
                self._use(block_bytes, layers)
            case Expect(request_id, targets):
                return self._needed.expect(request_id, targets)
            case Forget(request_id):
                self._needed.forget(request_id)
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
        self._cache = self._end.cache(block_bytes, layers)
        self._unpacking = Unpacking(self._end, self._cache)
        self._expected_slots = shaped(self._expected, block_bytes, layers)

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
        leftovers = self._needed.leftovers()
        if leftovers is not None:
            return leftovers
        stray = strays(self._end.memory)
        return f"{stray} bytes were written outside D's blocks" if stray else None


if __name__ == "__main__":
    run_decode(DecodeEnd, sys.argv[1])
