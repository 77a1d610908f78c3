"""Layouts that vLLM uses, whole and one rank's heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.kernelreference import gather_reference
from layerpush_kernels import gather_blocks, layer_table
from tests.unit.kernels.arena import noise
from tests.unit.kernels.places import PLACES, running_at

BLOCKS, SIZE, HEADS, DIM = 6, 4, 4, 24
Maker = Callable[[torch.device, int], torch.Tensor]


def filled(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """All values are numbers: NaN would differ from itself here."""
    return (noise(torch.Size(shape).numel(), seed).to(torch.bfloat16) - 128).view(shape).to(device)


LAYOUTS: dict[str, Maker] = {
    "NHD": lambda device, seed: filled((BLOCKS, 2, SIZE, HEADS, DIM), device, seed),
    "HND": lambda device, seed: filled((BLOCKS, 2, HEADS, SIZE, DIM), device, seed).transpose(2, 3),
    "halves, NHD": lambda device, seed: filled((2, BLOCKS, SIZE, HEADS, DIM), device, seed).movedim(1, 0),
    "halves, HND": lambda device, seed: (
        filled((2, BLOCKS, HEADS, SIZE, DIM), device, seed).transpose(2, 3).movedim(1, 0)
    ),
    "layer of a block of layers": lambda device, seed: filled((BLOCKS, 3, 2, SIZE, HEADS, DIM), device, seed)[:, 2],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("heads", [slice(0, HEADS), slice(1, 3), slice(3, 4)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_keeps_the_order_of_its_bytes(layout: str, heads: slice, place: str) -> None:
    with running_at(place) as device:
        part = LAYOUTS[layout](device, 1)[..., heads, :]
        ids = torch.tensor([5, 0, 3], device=device)
        packed = torch.empty(3 * part[0].nbytes, dtype=torch.uint8, device=device)
        gather_blocks(part, ids, packed)
        assert torch.equal(packed, gather_reference([part], ids).view(-1))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shifts", [(0, 0, 0), (0, 8, 16), (0, 4, 0), (2, 0, 0), (0, 0, 1), (16, 3, 8)], ids=str)
def test_the_least_aligned_layer_decides_for_all(shifts: tuple[int, ...], place: str) -> None:
    with running_at(place) as device:
        memories = [noise(5 * 64 + 16, seed).to(device) for seed in range(len(shifts))]
        caches = [memory[shift:][: 5 * 64].view(5, 64) for memory, shift in zip(memories, shifts, strict=True)]
        ids = torch.tensor([4, 1], device=device)
        out = torch.zeros((len(caches), 2, 64), dtype=torch.uint8, device=device)
        gather_blocks(layer_table(caches), ids, out)
        assert torch.equal(out, torch.stack([cache[ids] for cache in caches]))
