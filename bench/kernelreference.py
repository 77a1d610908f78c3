"""A gather in plain torch, block by block. Slow and obvious: a reference for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_reference(caches: Sequence[torch.Tensor], block_ids: torch.Tensor) -> torch.Tensor:
    """Gather blocks ``block_ids`` (integers ``[n]``) of caches ``[num_blocks, ...]``.

    Returns uint8 ``[layers, n, block_bytes]`` on the device of the caches. A block's bytes are in the order of their
    addresses: dimensions by falling stride. It waits for the device; any thread. Raises ``IndexError`` for an id
    outside a cache.
    """
    first, ids = caches[0], block_ids.tolist()
    block_bytes = first.shape[1:].numel() * first.element_size()
    out = first.new_empty((len(caches), len(ids), block_bytes), dtype=torch.uint8)
    for layer, cache in zip(out, caches, strict=True):
        for row, block in zip(layer, ids, strict=True):
            source = _in_memory_order(cache[block])
            row.view(cache.dtype).view(source.shape).copy_(source)
    return out


def _in_memory_order(block: torch.Tensor) -> torch.Tensor:
    order = sorted(range(block.dim()), key=block.stride, reverse=True)
    return block.permute(order)
