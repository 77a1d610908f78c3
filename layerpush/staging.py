"""A rank's staging memory: a ring of bytes that NIXL knows, and the copies between it and the KV cache."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from layerpush.layout import BlockIds
from layerpush.ring import Ring

PIECE_BYTES = 8192
"""A ring's descriptors have so many bytes each; NIXL merges neighbours. Spans that travel from ring to ring are whole
pieces."""
MAX_PIECES = 1023
"""From 1024 descriptors on NIXL spreads a WRITE over several endpoints, and nothing tells when a torn one is over."""
COOL_BYTES = 8 << 20


class Copy(Protocol):
    """Blocks on their way between cache and ring."""

    def is_over(self) -> bool:
        """Whether every byte is where it belongs. Waits for nothing."""


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
