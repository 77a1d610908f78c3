"""D's process: a cache to be written to, our unpacker, and the check of every byte.

A script. Argument: file descriptor of its end of a socket pair with P.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import torch

from bench.pair.end import digest_of, fill_with_noise, shaped
from bench.pair.meeting import DecodeSide, run_decode
from bench.pair.orders import Expect, Forget, Poison
from bench.pair.settings import POISON, Settings
from bench.pair.tables import Draw
from bench.push.orders import Check
from layerpush.core.wire import Registration


class DecodeEnd(DecodeSide):
    """Compares D's blocks with the bytes of P's cache, which it makes from the same seed."""

    def __init__(self, prefill: Connection, settings: Settings) -> None:
        super().__init__(prefill, settings)
        self._expected = torch.empty_like(self._end.memory)
        fill_with_noise(self._expected, settings.seed)
        self._meet(digest_of(self._expected))

    def obey(self, order: object) -> Registration | str | None:
        match order:
            case Expect(request_id, targets):
                return self._needed.expect(request_id, targets)
            case Forget(request_id):
                self._needed.forget(request_id)
            case Poison():
                self._end.ring.fill_(POISON)
            case Check(draw):
                return self._check(draw)
            case _:
                raise ValueError(order)
        return None

    def _check(self, draw: Draw) -> str | None:
        """The problem if the blocks are not P's, else None. Poisons the blocks."""
        assert self._cache is not None
        sources = torch.tensor(draw.sources, device=self._end.device)
        block_bytes, layers = self._cache.slots[0].shape[1], len(self._cache.slots)
        expected = (layer.index_select(0, sources) for layer in shaped(self._expected, block_bytes, layers))
        wrong = self._wrong_bytes(draw.targets, expected)
        return f"{wrong} bytes of D's blocks are not P's" if wrong else None


if __name__ == "__main__":
    run_decode(DecodeEnd, sys.argv[1])
