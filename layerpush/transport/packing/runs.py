"""How many contiguous pieces a WRITE has. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from layerpush.core.layout import CacheLayout
from layerpush.transport.packing.cost_model import Shape


def runs(*sides: NDArray[np.int32]) -> int:
    """In how many pieces block ids of equal shape ``(n,)`` fall that ascend by one on all ``sides``, as NIXL merges
    them.
    """
    if not len(sides[0]):
        return 0
    breaks = np.zeros(len(sides[0]) - 1, dtype=bool)
    for ids in sides:
        breaks |= np.diff(ids) != 1
    return 1 + int(np.count_nonzero(breaks))


def shape_of(local: NDArray[np.int32], remote: NDArray[np.int32], block_bytes: int) -> Shape:
    """What a WRITE takes by each plan, whose descriptors of ``block_bytes`` bytes each are these, pairwise."""
    return Shape(len(remote) * block_bytes, runs(local, remote), runs(remote))


def slots_of(layout: CacheLayout, layers: slice) -> list[int]:
    """The regions of some layers, in the order in which their blocks are packed."""
    return [slot for layer in layout.layers[layers] for slot in layer.slots]


def packed_bytes(layout: CacheLayout, layers: slice, blocks: int) -> int:
    """Bytes of ``blocks`` scheduler blocks in each of these layers."""
    return blocks * sum(layout.layer_bytes[layers])


def is_uniform(layout: CacheLayout, segments: Sequence[slice]) -> int | None:
    """The bytes of a kernel block, if it has as many in every region of these layers; else None."""
    sizes = {layout.regions[slot].block_bytes for layers in segments for slot in slots_of(layout, layers)}
    return sizes.pop() if len(sizes) == 1 else None
