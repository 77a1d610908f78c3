"""Staging memory of numpy bytes, whose copies take as long as a test wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from layerpush.core.layout import BlockIds, CacheLayout
from layerpush.transport.gather.memory import slots_of
from layerpush.transport.gather.ring import Ring
from tests.support.fake_transport import Bytes


class HeldCopy:
    """Copies at its end: an earlier change of either side changes the copied bytes."""

    def __init__(self, copy: Callable[[], None], looks: int, device_s: float = 0.0) -> None:
        self._copy = copy
        self._device_s = device_s
        self._looks = looks
        self._happened = False

    def is_over(self) -> bool:
        self._looks -= 1
        if self._looks < 0 and not self._happened:
            self._happened = True
            self._copy()
        return self._happened

    def device_s(self) -> float:
        return self._device_s


class BrokenCopy:
    """A copy that fails."""

    def is_over(self) -> bool:
        raise RuntimeError("an error of the device")

    def device_s(self) -> float:
        return 0.0


class NumpyStaging:
    """A `Staging` over ``cache``, flat bytes with region after region. The next copies need ``looks`` looks each.
    Each reports ``device_s`` seconds of its device.
    """

    def __init__(self, layout: CacheLayout, cache: Bytes, size: int) -> None:
        self.ring = Ring(size)
        self.memory = np.full(size, 0xDD, np.uint8)
        self.looks: deque[int] = deque()
        self.device_s = 0.0
        self._layout = layout
        self._cache = cache
        sizes = [region.blocks * region.block_bytes for region in layout.regions]
        self._starts = np.cumsum([0, *sizes[:-1]]).tolist()

    def gather(self, layers: slice, blocks: BlockIds, offset: int) -> HeldCopy:
        def copy() -> None:
            for packed, block in self._pairs(layers, blocks, offset):
                packed[:] = block

        return HeldCopy(copy, self.looks.popleft() if self.looks else 0, self.device_s)

    def _pairs(self, layers: slice, blocks: BlockIds, offset: int) -> list[tuple[Bytes, Bytes]]:
        pairs = []
        for slot in slots_of(self._layout, layers):
            size = self._layout.regions[slot].block_bytes
            for block in blocks.tolist():
                at = self._starts[slot] + block * size
                assert 0 <= block < self._layout.regions[slot].blocks
                pairs.append((self.memory[offset : offset + size], self._cache[at : at + size]))
                offset += size
        assert offset <= len(self.memory)
        return pairs
