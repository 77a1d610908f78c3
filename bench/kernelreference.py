"""Gather and scatter in plain torch, block by block. Slow and obvious: a reference for tests and benchmarks."""

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


def scatter_reference(packed: torch.Tensor, block_ids: torch.Tensor, caches: Sequence[torch.Tensor]) -> None:
    """The inverse: ``packed`` is uint8 ``[layers, n, block_bytes]``. Of equal ids the last one counts.

    It waits for the device; any thread. Raises ``ValueError`` if the lengths differ, ``IndexError`` for an id outside a
    cache.
    """
    for layer, cache in zip(packed, caches, strict=True):
        for row, block in zip(layer, block_ids.tolist(), strict=True):
            target = _in_memory_order(cache[block])
            target.copy_(row.clone().view(cache.dtype).view(target.shape))


def _in_memory_order(block: torch.Tensor) -> torch.Tensor:
    order = sorted(range(block.dim()), key=block.stride, reverse=True)
    return block.permute(order)
