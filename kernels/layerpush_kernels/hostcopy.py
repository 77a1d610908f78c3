"""A gather in CPU memory, with torch's own operator."""

from __future__ import annotations

import math

import torch

from layerpush_kernels.geometry import Geometry
from layerpush_kernels.layers import LayerTable

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gather_blocks(table: LayerTable, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Gather in the calling thread, with arguments that :mod:`layerpush_kernels.gather` has checked."""
    layers = packed.view(len(table), -1)
    for cache, layer in zip(table.caches, layers, strict=True):
        size = math.gcd(8, table.geometry.alignment(_offset(cache), _offset(layer)))
        blocks = _words(cache, size, table.geometry)
        rows = _words(layer, size, _packed(table.geometry, block_ids.numel()))
        torch.index_select(blocks, 0, block_ids, out=rows)


def _packed(geometry: Geometry, count: int) -> Geometry:
    """The geometry of ``count`` such blocks without gaps."""
    inner, outer = geometry.run_bytes, geometry.run_bytes * geometry.inner_runs
    return Geometry(count, geometry.block_bytes, geometry.outer_runs, outer, geometry.inner_runs, inner, inner)


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _words(tensor: torch.Tensor, size: int, geometry: Geometry) -> torch.Tensor:
    """A view of the tensor's memory as words of ``size`` bytes: ``[num_blocks, outer_runs, inner_runs, words]``."""
    shape = (geometry.num_blocks, geometry.outer_runs, geometry.inner_runs, geometry.run_bytes // size)
    strides = (geometry.block_stride // size, geometry.outer_stride // size, geometry.inner_stride // size, 1)
    words = torch.empty(0, dtype=WORDS[size])
    return words.set_(tensor.untyped_storage(), _offset(tensor) // size, shape, strides)
