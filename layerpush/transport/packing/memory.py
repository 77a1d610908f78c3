"""A rank's staging memory: a ring of bytes that NIXL knows, and the copies between it and the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from layerpush.core.layout import BlockIds
from layerpush.transport.packing.ring import Ring

PIECE_BYTES = 8192
"""A ring's descriptors have so many bytes each; NIXL merges neighbours. Spans that travel from ring to ring are whole
pieces."""
MAX_PIECES = 1023
"""From 1024 descriptors on NIXL spreads a WRITE over several endpoints, and nothing tells when a torn one is over."""
COOL_BYTES = 8 << 20


class Copy(Protocol):
    """Blocks on their way between cache and ring."""

    def is_over(self) -> bool:
        """Whether every byte is where it belongs. Waits for nothing. What it raises ends the copy."""


class Copies:
    """Copies that belong together. ``failure`` says why one of them did not happen, if so."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self._running: list[Copy] = []

    def begin(self, start: Callable[[], Copy]) -> None:
        """One more, unless one before it has failed."""
        if self.failure is not None:
            return
        try:
            self._running.append(start())
        except Exception as error:  # noqa: BLE001  a device's or its driver's: what was begun before still has to end
            self._fail(error)

    def are_over(self) -> bool:
        """Whether all have ended, well or not: nothing reads or writes for them any more. Waits for nothing."""
        self._running = [copy for copy in self._running if not self._is_over(copy)]
        return not self._running

    def _is_over(self, copy: Copy) -> bool:
        try:
            return copy.is_over()
        except Exception as error:  # noqa: BLE001  a device that reports an error runs nothing any more
            self._fail(error)
            return True

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or f"{type(error).__name__}: {error}"


class Staging(Protocol):
    """Writer thread only. Blocks are kernel blocks, ``layers`` indices in model order; packed: block after block,
    region after region, layer after layer.
    """

    ring: Ring

    def gather(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:
        """From the cache to byte ``offset`` of the ring. The blocks must stay as they are until the copy is over."""

    def scatter(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:
        """From byte ``offset`` of the ring to the cache."""


def cool() -> None:
    """Leave nothing in the core's own caches, neither data nor code, as a forward pass does between two WRITEs."""
    np.full(COOL_BYTES, 1, np.uint8)


def whole_pieces(size: int) -> int:
    """``size`` bytes, rounded up to pieces."""
    return -(-size // PIECE_BYTES) * PIECE_BYTES
