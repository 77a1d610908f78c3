"""A rank's staging memory: a ring of bytes that is registered with NIXL, and the copies between it and the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from layerpush.core.layout import BlockIds, CacheLayout
from layerpush.transport.gather.ring import Ring

COOL_BYTES = 8 << 20


class Copy(Protocol):
    """A copy between cache and ring that has begun."""

    def is_over(self) -> bool:
        """Whether all bytes are copied. Does not wait. If it raises, the copy has failed and is over."""

    def device_s(self) -> float:
        """Seconds that the device copied for; 0 if the host copied. Call it after the copy is over."""


class Copies:
    """Copies that belong together. ``failure`` is the error of the first that failed, else None. ``have_begun``:
    whether one of them was started. ``device_s``: seconds that the device copied for, of those that are over.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self.have_begun = False
        self.device_s = 0.0
        self._running: list[Copy] = []

    def begin(self, start: Callable[[], Copy]) -> None:
        """Start one more copy, unless an earlier one has failed."""
        if self.failure is not None:
            return
        try:
            self._running.append(start())
            self.have_begun = True
        except Exception as error:  # noqa: BLE001  an error of the device or its driver: earlier copies still run
            self._fail(error)

    def are_over(self) -> bool:
        """Whether all have ended, successfully or not: none of them reads or writes any more. Does not wait."""
        self._running = [copy for copy in self._running if not self._is_over(copy)]
        return not self._running

    def _is_over(self, copy: Copy) -> bool:
        try:
            if not copy.is_over():
                return False
            self.device_s += copy.device_s()
        except Exception as error:  # noqa: BLE001  after an error a device runs no copy any more
            self._fail(error)
        return True

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or f"{type(error).__name__}: {error}"


class Staging(Protocol):
    """Writer thread only. Blocks are kernel blocks; ``layers`` are indices in the layout.

    Blocks are packed layer by layer, in a layer region by region, in a region block by block.
    """

    ring: Ring

    def gather(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:
        """Copy from the cache to byte ``offset`` of the ring. The blocks must not change until the copy is over."""


def slots_of(layout: CacheLayout, layers: slice) -> list[int]:
    """The slots of these layers, in the order of ``Staging``."""
    return [slot for layer in layout.layers[layers] for slot in layer.slots]


def cool() -> None:
    """Evict data and code from the core's own caches, as a forward pass does between two WRITEs."""
    np.full(COOL_BYTES, 1, np.uint8)
