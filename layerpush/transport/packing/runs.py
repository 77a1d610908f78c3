"""Counts the contiguous runs of a WRITE. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerpush.core.layout import CacheLayout
from layerpush.transport.packing.cost_model import TransferSize


def runs(*sides: NDArray[np.int32]) -> int:
    """Count the runs in block ids of equal shape ``(n,)``. In a run the ids of all ``sides`` ascend by one, and NIXL
    merges it into one descriptor.
    """
    if not len(sides[0]):
        return 0
    breaks = np.zeros(len(sides[0]) - 1, dtype=bool)
    for ids in sides:
        breaks |= np.diff(ids) != 1
    return 1 + int(np.count_nonzero(breaks))


def transfer_size(local: NDArray[np.int32], remote: NDArray[np.int32], block_bytes: int) -> TransferSize:
    """The size of a WRITE with these pairs of descriptor ids, of ``block_bytes`` bytes each."""
    return TransferSize(len(remote) * block_bytes, runs(local, remote), runs(remote))


def slots_of(layout: CacheLayout, layers: slice) -> list[int]:
    """The slots of these layers, in packed order."""
    return [slot for layer in layout.layers[layers] for slot in layer.slots]
