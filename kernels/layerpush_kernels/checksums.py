"""Adler-32 of parts of a KV cache in a GPU's memory. A part is some tokens of all heads of a block."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from layerpush_kernels.gather import FULL_DEVICE_PROGRAMS
from layerpush_kernels.geometry import WIDEST_ACCESS

TILE = 512  # accesses; four of each thread, in flight together
WARPS = 4
MOST_BYTES = 2**28  # of a part: the weighted sum of its bytes fits into 64 bits
SIZES = ["count", "num_blocks", "heads", "block_tokens", "token_units"]
STRIDES = ["block_stride", "head_stride", "token_stride"]


def checksum_parts(
    cache: torch.Tensor,
    parts: torch.Tensor,
    out: torch.Tensor,
    *,
    max_programs: int = FULL_DEVICE_PROGRAMS,
) -> None:
    """Put the Adler-32 (RFC 1950; ``zlib.adler32``) of each of ``parts`` of a cache into ``out``.

    ``cache`` is ``[num_blocks, heads, tokens, content]`` of any dtype, with contiguous content and otherwise any
    strides; heads may be a slice of a block's. ``parts`` is contiguous int32 ``[n, 3]``: block, first token, number of
    tokens. The bytes of a part are those of ``cache[block, :, first : first + number].contiguous()``. ``out`` is
    contiguous int64 ``[n]``. All are on one CUDA device. A part outside the cache is not read: ``out`` gets 1 for it.

    One launch on the current stream, of at most ``max_programs`` programs of 128 threads. It neither waits nor
    allocates; the first call of a kind compiles. Keep all tensors alive until the stream has run the launch. Any thread
    may call it. Raises ``ValueError`` for other shapes, dtypes or devices and for ``max_programs`` below 1.
    """
    _check(cache, parts, out, max_programs)
    size, count = cache.element_size(), parts.shape[0]
    lengths = zip(cache.shape, cache.stride(), strict=True)
    block, head, token, _ = (stride * size if length > 1 else 0 for length, stride in lengths)
    content = cache.shape[3] * size
    unit = math.gcd(WIDEST_ACCESS, cache.data_ptr(), content, block, head, token)
    if count == 0:
        return
    with torch.cuda.device_of(cache):
        sum_parts[(min(count, max_programs),)](
            cache.data_ptr() // unit,
            parts,
            out,
            count,
            cache.shape[0],
            cache.shape[1],
            cache.shape[2],
            content // unit,
            block // unit,
            head // unit,
            token // unit,
            UNIT=unit,
            TILE=TILE,
            num_warps=WARPS,
        )


@triton.jit(do_not_specialize=["cache", "parts", "out", *SIZES, *STRIDES])
def sum_parts(  # type: ignore[no-untyped-def]
    cache: tl.int64,
    parts,
    out,
    count: tl.int32,
    num_blocks: tl.int32,
    heads: tl.int32,
    block_tokens: tl.int32,
    token_units: tl.int32,
    block_stride: tl.int64,
    head_stride: tl.int64,
    token_stride: tl.int64,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program takes one part after the other, each in tiles of TILE accesses of UNIT bytes. Lengths and strides are
    in units of UNIT bytes. Of n bytes d_0 to d_(n-1) Adler-32 is 1 + sum d_i and n + sum (n - i) d_i, modulo 65521.
    """
    lanes = tl.arange(0, UNIT)[None, :]
    for part in range(tl.program_id(0), count, tl.num_programs(0)):
        block, first, tokens = tl.load(parts + 3 * part), tl.load(parts + 3 * part + 1), tl.load(parts + 3 * part + 2)
        known = (block >= 0) & (block < num_blocks) & (first >= 0) & (tokens > 0) & (tokens <= block_tokens - first)
        units = tl.where(known, heads * tokens * token_units, 0)
        start = cache + block.to(tl.int64) * block_stride + first.to(tl.int64) * token_stride
        low, high = tl.full([TILE], 0, tl.int32), tl.full([TILE], 0, tl.int64)
        for tile in range(0, units, TILE):
            unit = tile + tl.arange(0, TILE)
            run = unit // token_units
            head, token = (run // tokens).to(tl.int64), (run % tokens).to(tl.int64)
            at = start + head * head_stride + token * token_stride + unit % token_units
            there = tl.multiple_of((at * UNIT)[:, None].to(tl.pointer_type(tl.uint8)), [UNIT, UNIT]) + lanes
            found = tl.load(there, (unit < units)[:, None], 0).to(tl.int32)
            total = tl.sum(found, 1)
            low += total
            high += (units - unit).to(tl.int64) * UNIT * total - tl.sum(found * lanes, 1)
        first_sum = (1 + tl.sum(low.to(tl.int64), 0)) % 65521
        second_sum = (units.to(tl.int64) * UNIT + tl.sum(high, 0)) % 65521
        tl.store(out + part, second_sum * 65536 + first_sum)


def _check(cache: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, max_programs: int) -> None:
    if cache.dim() != 4 or 0 in cache.shape[1:] or (cache.shape[3] > 1 and cache.stride(3) != 1):
        raise ValueError(
            f"a cache of {list(cache.shape)} with strides {list(cache.stride())} has no contiguous content"
        )
    if cache.shape[1:].numel() * cache.element_size() > MOST_BYTES:
        raise ValueError(f"a block of {list(cache.shape[1:])} has more than {MOST_BYTES} bytes")
    if parts.dtype != torch.int32 or parts.dim() != 2 or parts.shape[1] != 3 or not parts.is_contiguous():
        raise ValueError(f"parts are contiguous int32 [n, 3], not {parts.dtype} {list(parts.shape)}")
    if out.dtype != torch.int64 or out.shape != parts.shape[:1] or not out.is_contiguous():
        raise ValueError(f"{parts.shape[0]} parts need contiguous int64, not {out.dtype} {list(out.shape)}")
    if not cache.device == parts.device == out.device:
        raise ValueError(f"cache on {cache.device}, parts on {parts.device}, checksums on {out.device}")
    if max_programs < 1:
        raise ValueError(f"max_programs is {max_programs}, and must be 1 at least")
