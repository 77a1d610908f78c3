"""Offsets over 2**31 elements and over 2**32 bytes. Only copied blocks are touched in memory."""

from __future__ import annotations

import pytest
import torch

from layerpush_kernels import gather, gather_blocks, layer_table
from tests.unit.kernels.arena import noise
from tests.unit.kernels.places import KERNEL_PLACES, PLACES, running_at

FAR = 3 * 2**29  # elements, and bytes too of the one-byte dtype; twice that is over 2**31
RUN = 48


@pytest.fixture(params=[torch.uint8, torch.bfloat16], ids=str)
def memory(request: pytest.FixtureRequest, place: str) -> torch.Tensor:
    """Aligned to one element only: strides in units of an access are as large as possible."""
    return torch.empty(2 * FAR + 3 * RUN, dtype=request.param, device="cuda" if place == "cuda" else "cpu")[1:]


def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Three blocks, runs, inner runs or outer runs that lie 3 * 2**29 elements apart."""
    start = memory.storage_offset()
    return {
        "blocks": memory.as_strided((3, RUN), (FAR, 1), start),
        "runs": memory.as_strided((2, 3, RUN // 2), (RUN, FAR, 1), start),
        "inner runs": memory.as_strided((1, 3, RUN), (1, FAR, 1), start),
        "outer runs": memory.as_strided((1, 3, 3, RUN // 4), (1, FAR, RUN // 2, 1), start),
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", ["blocks", "runs", "inner runs", "outer runs"])
def test_blocks_and_runs_at_large_offsets_are_copied(memory: torch.Tensor, what: str, place: str) -> None:
    with running_at(place) as device:
        cache = views(memory)[what]
        ids = torch.arange(len(cache), device=device).flip(0)
        cache.copy_((noise(cache.numel(), seed=1) & 63).view(cache.shape))
        out = torch.zeros((len(ids), *cache.shape[1:]), dtype=cache.dtype, device=device)
        gather_blocks(layer_table([cache]), ids, out)
        assert torch.equal(out, cache[ids])


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_packed_blocks_at_large_offsets_are_copied(place: str) -> None:
    """Packed blocks of 2**30 bytes, of which the kernel is asked to copy the first tile only."""
    with running_at(place) as device:
        block, tile = 2**30, 256
        cache = torch.empty(block, dtype=torch.uint8, device=device)
        packed = torch.empty((4, block), dtype=torch.uint8, device=device)
        ids = torch.zeros(4, dtype=torch.int64, device=device)
        cache[:tile] = noise(tile, seed=1).to(device)
        packed[:, : tile + 1] = 7
        sizes = {"count": 4, "num_blocks": 1, "tasks": 4, "tiles": 1, "inner_runs": 1}
        units = {"run_units": block, "block_units": block, "block_stride": 0, "outer_stride": 0, "inner_stride": 0}
        where = {"pointers": None, "cache": cache.data_ptr(), "packed": packed.data_ptr(), "ids": ids}
        gather.copy_blocks[(2,)](**where, **sizes, **units, SPLIT=False, UNIT=1, TILE=tile)
        assert torch.equal(packed[:, :tile], cache[:tile].expand(4, tile))
        assert bool((packed[:, tile] == 7).all())
