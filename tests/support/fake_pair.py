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


def unpoisoned(count: int, size: int) -> NDArray[np.uint8]:
    """Random bytes, the same every time. None is poison, so a landed row differs from an untouched one in each byte."""
    return np.random.default_rng(0).integers(0, POISON, (count, size), dtype=np.uint8)


class Pair:
    """``count`` descriptors of ``size`` bytes on each side. D's memory is poisoned."""

    def __init__(
        self,
        faults: Faults | None = None,
        seed: int = 0,
        *,
        ordered: bool = True,
        count: int = COUNT,
        size: int = SIZE,
    ) -> None:
        self.fabric = FakeFabric(faults, seed, ordered=ordered)
        self.source, self.target = unpoisoned(count, size), np.full((count, size), POISON, np.uint8)
        self.p, self.d = self.fabric.endpoint("P"), self.fabric.endpoint("D")
        offsets = range(0, count * size, size)
        self.ours = self.p.describe("kv", self.source.reshape(-1), offsets, size)
        self.theirs = self.d.describe("kv", self.target.reshape(-1), offsets, size)

    def post(self, local: NDArray[np.int32] = ALL, remote: NDArray[np.int32] = ALL) -> WriteHandle:
        return self.p.post_write(ROUTE, local, remote)

    def land(self, handle: WriteHandle) -> None:
        while self.p.poll(handle) is WriteState.PENDING:
            pass

    def landed(self) -> set[int]:
        """D's descriptors that are no longer poisoned."""
        return {index for index in range(COUNT) if (self.target[index] != POISON).all()}
