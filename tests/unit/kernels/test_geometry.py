"""Geometry: its values from shapes and strides, for every layout of vLLM, and its refusals."""

from __future__ import annotations

import pytest
import torch

from layerpush_kernels import Geometry, geometry_of

BLOCKS, SIZE, HEADS, DIM = 10, 16, 4, 64
TOKEN = HEADS * DIM * 2  # bytes of bf16 K or V of one token
HALF = SIZE * TOKEN


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def nhd() -> torch.Tensor:
    return bf16(BLOCKS, 2, SIZE, HEADS, DIM)


def hnd() -> torch.Tensor:
    """Heads before tokens in memory, tokens before heads in the shape: as vLLM's attention backends see it."""
    return bf16(BLOCKS, 2, HEADS, SIZE, DIM).transpose(2, 3)


def halves() -> torch.Tensor:
    return bf16(2, BLOCKS, SIZE, HEADS, DIM).movedim(1, 0)


def all_layers() -> torch.Tensor:
    """One layer of a cache whose blocks hold three layers."""
    return bf16(BLOCKS, 3, 2, SIZE, HEADS, DIM)[:, 1]


WHOLE = 2 * HALF
VLLM_LAYOUTS = {
    "K and V in a block": (nhd(), Geometry(BLOCKS, WHOLE, 1, 0, 1, 0, WHOLE)),
    "K and V in a block, heads first": (hnd(), Geometry(BLOCKS, WHOLE, 1, 0, 1, 0, WHOLE)),
    "halves": (halves(), Geometry(BLOCKS, HALF, 1, 0, 2, BLOCKS * HALF, HALF)),
    "MLA": (bf16(BLOCKS, 64, 576), Geometry(BLOCKS, 64 * 576 * 2, 1, 0, 1, 0, 64 * 576 * 2)),
    "MLA, padded": (bf16(BLOCKS, 80, 576)[:, :64], Geometry(BLOCKS, 80 * 1152, 1, 0, 1, 0, 64 * 1152)),
    "one layer of many": (all_layers(), Geometry(BLOCKS, 3 * WHOLE, 1, 0, 1, 0, WHOLE)),
    "two heads": (nhd()[..., 1:3, :], Geometry(BLOCKS, WHOLE, 1, 0, 2 * SIZE, TOKEN, TOKEN // 2)),
    "two heads, heads first": (hnd()[..., 1:3, :], Geometry(BLOCKS, WHOLE, 1, 0, 2, HALF, HALF // 2)),
    "two heads of halves": (
        halves()[..., 1:3, :],
        Geometry(BLOCKS, HALF, 2, BLOCKS * HALF, SIZE, TOKEN, TOKEN // 2),
    ),
    "one head of one layer of many": (
        all_layers()[..., :1, :],
        Geometry(BLOCKS, 3 * WHOLE, 1, 0, 2 * SIZE, TOKEN, TOKEN // 4),
    ),
    "one block": (nhd()[:1], Geometry(1, 0, 1, 0, 1, 0, WHOLE)),
    "no dimensions but blocks": (torch.empty(5, device="meta"), Geometry(5, 4, 1, 0, 1, 0, 4)),
}


@pytest.mark.parametrize("layout", VLLM_LAYOUTS)
def test_every_layout_has_a_geometry(layout: str) -> None:
    cache, geometry = VLLM_LAYOUTS[layout]
    assert geometry_of(cache) == geometry
    assert geometry.block_bytes == cache.shape[1:].numel() * cache.element_size()
    last = sum((length - 1) * stride for length, stride in zip(cache.shape, cache.stride(), strict=True))
    assert geometry.extent == (last + 1) * cache.element_size()


def test_a_cache_without_blocks_has_no_extent() -> None:
    assert geometry_of(bf16(0, 16)).extent == 0


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((), ()),
        ((4, 0), (1, 1)),
        ((4, 3), (0, 1)),  # all blocks the same memory
        ((4, 3), (2, 1)),  # blocks reach into the next
        ((4, 3, 8), (24, 4, 1)),  # runs reach into the next
        ((4, 2, 3, 5), (480, 200, 50, 8)),  # three levels of runs of one element
    ],
)
def test_a_cache_without_a_geometry_is_refused(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a cache is|share memory|levels"):
        geometry_of(torch.empty_strided(shape, strides, device="meta"))


@pytest.mark.parametrize(
    ("run_bytes", "strides", "addresses", "alignment"),
    [
        (4096, (8192, 0, 0), (512, 1024), 16),
        (4096, (8192, 0, 0), (512, 1032), 8),
        (4096, (8200, 0, 0), (512,), 8),
        (4096, (8192, 4, 0), (512,), 4),
        (4096, (8192, 0, 6), (512,), 2),
        (4095, (8192, 0, 0), (512,), 1),
    ],
)
def test_the_alignment_fits_the_run_the_strides_and_all_addresses(
    run_bytes: int, strides: tuple[int, int, int], addresses: tuple[int, ...], alignment: int
) -> None:
    block, outer, inner = strides
    assert Geometry(9, block, 1, outer, 1, inner, run_bytes).alignment(*addresses) == alignment
