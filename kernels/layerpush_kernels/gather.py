"""Gather scattered KV blocks of one or several layers into contiguous memory, byte for byte."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from layerpush_kernels import hostcopy
from layerpush_kernels.layers import LayerTable, single_layer

FULL_DEVICE_PROGRAMS = 2048
TILE_UNITS = (1024, 512, 256)
UNITS_PER_WARP = 4 * 32  # four accesses per thread, in flight together
INT32_END = 2**31
SIZES = ["count", "num_blocks", "tasks", "tiles", "inner_runs", "run_units", "block_units"]
STRIDES = ["block_stride", "outer_stride", "inner_stride"]


def gather_blocks(
    cache: torch.Tensor | LayerTable,
    block_ids: torch.Tensor,
    out: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
    max_programs: int = FULL_DEVICE_PROGRAMS,
) -> None:
    """Copy blocks ``block_ids`` of a cache, or of all layers of a table, into ``out``, byte for byte.

    ``cache`` is ``[num_blocks, ...]`` of any dtype and strides (see :func:`geometry_of`) or a :class:`LayerTable` of
    such; ``block_ids`` is contiguous int32 or int64 ``[n]``, the same for all layers; ``out`` is contiguous and has
    exactly ``layers * n * block_bytes`` bytes, of any dtype and shape: layer by layer, then in the order of
    ``block_ids``, each block as :class:`Geometry` orders its bytes. All are on one device.

    On CUDA this is one launch on ``stream`` (None: the current one) of at most ``max_programs`` programs of 64 to 256
    threads each. It neither waits nor allocates. The first call of a kind compiles: make one at start-up with a block
    id of -1, which copies nothing. Keep all tensors alive, and the ids unchanged, until the stream has run the launch.
    On the CPU the copy is complete when the call returns. Any thread may call it. On the CPU an id outside the cache
    raises ``ValueError``. On CUDA it is skipped, because a check would wait for the device; its part of ``out`` stays
    as it was.

    Raises ``ValueError`` for other shapes, dtypes or devices, if ``out`` shares memory with a cache, for a stream of
    another device and for ``max_programs`` below 1.
    """
    table = cache if isinstance(cache, LayerTable) else single_layer(cache)
    _check(table, block_ids, out, stream, max_programs)
    if out.numel() == 0:
        return
    if table.device.type != "cpu":
        with torch.cuda.device(table.device), torch.cuda.stream(stream):
            _launch(table, block_ids, out, max_programs)
    elif isinstance(copy_blocks, triton.JITFunction):
        hostcopy.gather_blocks(table, block_ids, out)
    else:  # Triton's interpreter
        _launch(table, block_ids, out, max_programs)


def _launch(table: LayerTable, block_ids: torch.Tensor, packed: torch.Tensor, max_programs: int) -> None:
    geometry, count = table.geometry, block_ids.numel()
    unit = math.gcd(table.alignment, packed.data_ptr())
    block_units = geometry.block_bytes // unit
    tile = min(TILE_UNITS, key=lambda units: -block_units % units)  # the fewest idle units, then the largest tile
    tiles = -(-block_units // tile)
    tasks = len(table) * count * tiles
    if max(tasks + max_programs, tiles * tile, geometry.num_blocks) >= INT32_END:
        raise ValueError(f"{tasks} pieces of blocks of {geometry.block_bytes} bytes are more than a launch can count")
    copy_blocks[(min(tasks, max_programs),)](
        table.pointers,
        0 if table.pointers is not None else table.addresses[0] // unit,
        packed.data_ptr() // unit,
        block_ids,
        count,
        geometry.num_blocks,
        tasks,
        tiles,
        geometry.inner_runs,
        geometry.run_bytes // unit,
        block_units,
        geometry.block_stride // unit,
        geometry.outer_stride // unit,
        geometry.inner_stride // unit,
        SPLIT=geometry.run_bytes < geometry.block_bytes,
        UNIT=unit,
        TILE=tile,
        num_warps=tile // UNITS_PER_WARP,
    )


# Triton must not specialise an argument by value or alignment: it would compile again while an engine serves. Lengths,
# strides and the addresses of cache and packed are in units of UNIT bytes, so tl.multiple_of may promise alignment.
@triton.jit(do_not_specialize=["pointers", "cache", "packed", "ids", *SIZES, *STRIDES])
def copy_blocks(  # type: ignore[no-untyped-def]
    pointers,
    cache: tl.int64,
    packed: tl.int64,
    ids,
    count: tl.int32,
    num_blocks: tl.int32,
    tasks: tl.int32,
    tiles: tl.int32,
    inner_runs: tl.int32,
    run_units: tl.int32,
    block_units: tl.int32,
    block_stride: tl.int64,
    outer_stride: tl.int64,
    inner_stride: tl.int64,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """A task is (layer, index of a block id, tile of the block): TILE units, each an access of UNIT bytes."""
    WORD: tl.constexpr = tl.int64 if UNIT >= 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    lanes = tl.arange(0, 2 if UNIT == 16 else 1)[None, :]
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = task // tiles
        block = tl.load(ids + row % count).to(tl.int64)
        address = cache if pointers is None else tl.load(pointers + row // count) // UNIT
        unit = (task % tiles) * TILE + tl.arange(0, TILE)
        known = (block >= 0) & (block < num_blocks)
        mask = (unit < tl.where(known, block_units, 0))[:, None]
        contiguous = packed + row.to(tl.int64) * block_units + unit
        scattered = address + block * block_stride
        if SPLIT:
            run = unit // run_units
            outer, inner = (run // inner_runs).to(tl.int64), (run % inner_runs).to(tl.int64)
            scattered += outer * outer_stride + inner * inner_stride + unit % run_units
        else:
            scattered += unit
        here = tl.multiple_of((scattered * UNIT)[:, None].to(tl.pointer_type(WORD)), [UNIT, UNIT]) + lanes
        there = tl.multiple_of((contiguous * UNIT)[:, None].to(tl.pointer_type(WORD)), [UNIT, UNIT]) + lanes
        tl.store(there, tl.load(here, mask), mask)


def _check(
    table: LayerTable,
    block_ids: torch.Tensor,
    packed: torch.Tensor,
    stream: torch.cuda.Stream | None,
    max_programs: int,
) -> None:
    if block_ids.dim() != 1 or block_ids.dtype not in (torch.int32, torch.int64) or not block_ids.is_contiguous():
        raise ValueError(f"block ids are contiguous int32 or int64 [n], not {block_ids.dtype} {list(block_ids.shape)}")
    if not table.device == block_ids.device == packed.device:
        raise ValueError(f"cache on {table.device}, ids on {block_ids.device}, packed blocks on {packed.device}")
    if stream is not None and stream.device != table.device:
        raise ValueError(f"a stream of {stream.device} for tensors on {table.device}")
    if max_programs < 1:
        raise ValueError(f"max_programs is {max_programs}, and must be 1 at least")
    expected, got = len(table) * block_ids.numel() * table.geometry.block_bytes, packed.numel() * packed.element_size()
    if got != expected or not packed.is_contiguous():
        blocks = f"{len(table)} layers of {block_ids.numel()} blocks of {table.geometry.block_bytes} bytes"
        raise ValueError(f"{blocks} need {expected} contiguous bytes, not {got} with strides {packed.stride()}")
    start = packed.data_ptr()
    if any(at < start + got and start < at + table.geometry.extent for at in table.addresses):
        raise ValueError("packed blocks share memory with a cache")
    if block_ids.device.type == "cpu" and block_ids.numel():
        lowest, highest = (int(bound) for bound in torch.aminmax(block_ids))
        if lowest < 0 or highest >= table.geometry.num_blocks:
            raise ValueError(f"block ids from {lowest} to {highest} in a cache of {table.geometry.num_blocks} blocks")
