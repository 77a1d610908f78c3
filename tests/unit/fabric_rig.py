"""A prefill and a decode endpoint on a fake fabric, with a descriptor list each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerpush.transport.base import Route, WriteHandle, WriteState
from tests.support.fake_transport import FakeFabric, Faults

COUNT, SIZE = 16, 8
POISON = 0xEE
ROUTE = Route("D", 0, "kv", "kv")
ALL = np.arange(COUNT, dtype=np.int32)


class Pair:
    """D's memory is poisoned."""

    def __init__(self, faults: Faults | None = None, seed: int = 0, *, ordered: bool = True) -> None:
        self.fabric = FakeFabric(faults, seed, ordered=ordered)
        self.source = np.random.default_rng(0).integers(0, POISON, (COUNT, SIZE), dtype=np.uint8)
        self.target = np.full((COUNT, SIZE), POISON, np.uint8)
        self.p, self.d = self.fabric.endpoint("P"), self.fabric.endpoint("D")
        offsets = range(0, COUNT * SIZE, SIZE)
        self.ours = self.p.describe("kv", self.source.reshape(-1), offsets, SIZE)
        self.theirs = self.d.describe("kv", self.target.reshape(-1), offsets, SIZE)

    def post(self, local: NDArray[np.int32] = ALL, remote: NDArray[np.int32] = ALL) -> WriteHandle:
        return self.p.post_write(ROUTE, local, remote)

    def land(self, handle: WriteHandle) -> None:
        while self.p.poll(handle) is WriteState.PENDING:
            pass

    def landed(self) -> set[int]:
        """D's descriptors that are no longer poisoned."""
        return {index for index in range(COUNT) if (self.target[index] != POISON).all()}
