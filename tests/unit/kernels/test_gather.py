"""The gather against the plain reference, over any layout: every byte of the memory around is compared too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings

from bench.kernelreference import gather_reference
from layerpush_kernels import LayerTable, gather_blocks, layer_table
from tests.unit.kernels.arena import Guarded, noise, poisoned_bytes
from tests.unit.kernels.caches import Case, Layout, cases
from tests.unit.kernels.places import PLACES, running_at

# One element, with memory of another tensor behind it: torch calls it contiguous with any stride.
LONELY = Case(Layout((1, 1), (2, 2), torch.bfloat16, 0), 1, torch.tensor([0]), 0, 1, 0)

pytestmark = pytest.mark.parametrize("place", PLACES)


def layers_of(case: Case, device: torch.device) -> list[Guarded]:
    return [case.layout.place(device, case.seed + layer) for layer in range(case.layers)]


def argument(caches: list[Guarded]) -> torch.Tensor | LayerTable:
    """One cache as it is; several as a slice of a table with one more layer at each end."""
    if len(caches) == 1:
        return caches[0].tensor
    table = layer_table([cache.tensor for cache in (caches[-1], *caches, caches[0])])
    return table[1:-1]


@example(case=LONELY)
@settings(max_examples=75)
@given(case=cases())
def test_gather_writes_exactly_the_blocks(place: str, case: Case) -> None:
    with running_at(place) as device:
        caches = layers_of(case, device)
        before = [cache.clone() for cache in caches]
        out = poisoned_bytes(case.bytes, device, case.packed_offset)
        gather_blocks(argument(caches), case.ids.to(device), out.tensor, max_programs=case.max_programs)
        expected = poisoned_bytes(case.bytes, device, case.packed_offset)
        expected.tensor.copy_(gather_reference([cache.tensor for cache in caches], case.ids).view(-1))
        assert torch.equal(out.memory, expected.memory)
        assert all(torch.equal(cache.memory, was.memory) for cache, was in zip(caches, before, strict=True))


def test_gathering_from_an_empty_cache_succeeds(place: str) -> None:
    with running_at(place) as device:
        cache, ids = torch.empty((0, 16), device=device), torch.empty(0, dtype=torch.int64, device=device)
        gather_blocks(cache, ids, torch.empty((0, 16), device=device))


def test_out_may_have_the_dtype_and_shape_of_the_blocks(place: str) -> None:
    with running_at(place) as device:
        cache = torch.arange(5 * 2 * 16 * 8, device=device).to(torch.bfloat16).view(5, 2, 16, 8)
        ids = torch.tensor([3, 0, 4], device=device)
        out = torch.full((3, 2, 16, 8), torch.nan, dtype=torch.bfloat16, device=device)
        gather_blocks(cache, ids, out)
        assert torch.equal(out, cache[ids])


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_gather_copies_a_block_for_each_of_several_equal_ids(place: str, id_dtype: torch.dtype) -> None:
    with running_at(place) as device:
        cache = noise(4 * 48, seed=3).to(device).view(4, 48)
        ids = torch.tensor([2, 2, 0, 2], dtype=id_dtype, device=device)
        out = torch.zeros((4, 48), dtype=torch.uint8, device=device)
        gather_blocks(cache, ids, out)
        assert torch.equal(out, cache[ids.long()])
