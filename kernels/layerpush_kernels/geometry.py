"""The geometry of a KV block in memory: runs of contiguous bytes, with at most two levels of stride."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

WIDEST_ACCESS = 16  # bytes that one thread of a GPU loads or stores at once


@dataclass(frozen=True)
class Geometry:
    """Each of ``num_blocks`` blocks is ``outer_runs`` times ``inner_runs`` runs of ``run_bytes`` contiguous bytes.

    Byte ``b`` of run ``(o, i)`` of block ``n`` lies ``n * block_stride + o * outer_stride + i * inner_stride + b``
    bytes after the cache's address; the stride of a single element is 0. A packed block has ``block_bytes`` bytes: its
    runs in the order of their addresses, not in the order of the tensor's dimensions.
    """

    num_blocks: int
    block_stride: int
    outer_runs: int
    outer_stride: int
    inner_runs: int
    inner_stride: int
    run_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.outer_runs * self.inner_runs * self.run_bytes

    @property
    def extent(self) -> int:
        """Bytes from the cache's address to the end of its last block."""
        if not self.num_blocks:
            return 0
        outer, inner = (self.outer_runs - 1) * self.outer_stride, (self.inner_runs - 1) * self.inner_stride
        return (self.num_blocks - 1) * self.block_stride + outer + inner + self.run_bytes

    def alignment(self, *addresses: int) -> int:
        """The largest power of two up to 16 that divides the addresses, the strides and the length of a run (bytes)."""
        strides = (self.block_stride, self.outer_stride, self.inner_stride)
        return math.gcd(WIDEST_ACCESS, self.run_bytes, *strides, *addresses)


def geometry_of(cache: torch.Tensor) -> Geometry:
    """Read the geometry of a tensor ``[num_blocks, ...]`` of any dtype and any strides; any thread, no device work.

    Every KV layout of vLLM is such a tensor: ``[num_blocks, 2, ...]`` and MLA's ``[num_blocks, block_size, width]`` as
    they are, separate halves ``[2, num_blocks, ...]`` as ``kv.movedim(1, 0)``, one rank's heads as a slice of the head
    dimension. Raises ``ValueError`` if blocks are empty, if elements share memory or interleave, or if runs have more
    than two levels of stride.
    """
    if cache.dim() == 0 or 0 in cache.shape[1:]:
        raise ValueError(f"a cache is [num_blocks, ...] with blocks that are not empty, not {list(cache.shape)}")
    size = cache.element_size()
    steps = [(stride * size, length) for stride, length in zip(cache.stride(), cache.shape, strict=True)]
    _check_disjoint(steps, size, cache)
    run_bytes = size
    levels: list[tuple[int, int]] = []  # (stride, length), innermost first
    for stride, length in sorted(step for step in steps[1:] if step[1] > 1):
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0], levels[-1][1] * length)
        elif not levels and stride == run_bytes:
            run_bytes *= length
        else:
            levels.append((stride, length))
    if len(levels) > 2:
        raise ValueError(f"blocks of {list(cache.shape)} with strides {list(cache.stride())} have {len(levels)} levels")
    (inner_stride, inner_runs), (outer_stride, outer_runs) = (*levels, (0, 1), (0, 1))[:2]
    block_stride = steps[0][0] if cache.shape[0] > 1 else 0
    return Geometry(cache.shape[0], block_stride, outer_runs, outer_stride, inner_runs, inner_stride, run_bytes)


def _check_disjoint(steps: list[tuple[int, int]], size: int, cache: torch.Tensor) -> None:
    extent = size
    for stride, length in sorted(step for step in steps if step[1] > 1):
        if stride < extent:
            shape, strides = list(cache.shape), list(cache.stride())
            raise ValueError(f"elements of a cache share memory, or interleave: shape {shape}, strides {strides}")
        extent += stride * (length - 1)
