"""How many contiguous pieces a WRITE has. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from layerpush.layout import CacheLayout
from layerpush.prefill.costs import Shape
from layerpush.prefill.protocol import Write


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


def shape_of(write: Write, layout: CacheLayout) -> Shape:
    """What ``write`` takes by each plan, in bytes and runs of this engine's memory."""
    size = direct = gathered = 0
    for part in write.segments:
        slots = slots_of(layout, part.layers)
        source, target = layout.expand(part.source), layout.expand(part.target)
        size += len(source) * sum(layout.regions[slot].block_bytes for slot in slots)
        direct += len(slots) * runs(source, target)
        gathered += len(slots) * runs(target)
    return Shape(size, direct, gathered)


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
