"""Refusals of the gather, before any copy."""

from __future__ import annotations

import pytest
import torch

from layerpush_kernels import gather_blocks, layer_table
from tests.unit.kernels.places import running_at

CACHE = torch.arange(4 * 32, dtype=torch.int32).view(4, 32)
IDS = torch.tensor([2, 0])
BYTES = 2 * 32 * 4


def room(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


REFUSED: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]] = {
    "too small": (CACHE, IDS, room(BYTES - 1), f"{BYTES} contiguous bytes, not {BYTES - 1}"),
    "too large": (CACHE, IDS, room(BYTES + 1), f"{BYTES} contiguous bytes, not {BYTES + 1}"),
    "with gaps": (CACHE, IDS, room(2 * BYTES)[::2], "contiguous bytes"),
    "for no ids": (CACHE, IDS[:0], room(BYTES), "0 blocks"),
    "elsewhere": (CACHE, IDS, room(BYTES).to("meta"), "packed blocks on meta"),
    "ids elsewhere": (CACHE, IDS.to("meta"), room(BYTES), "ids on meta"),
    "short ids": (CACHE, IDS.short(), room(BYTES), "int16"),
    "ids of two dimensions": (CACHE, IDS.view(1, 2), room(BYTES), r"\[1, 2\]"),
    "ids with gaps": (CACHE, IDS.repeat(2)[::2], room(BYTES), "contiguous int32 or"),
    "an id below 0": (CACHE, IDS - 1, room(BYTES), "from -1 to 1"),
    "an id too high": (CACHE, IDS + 2, room(BYTES), "from 2 to 4 in a cache of 4"),
    "the cache itself": (CACHE, IDS, CACHE[2:], "share memory"),
    "no programs": (CACHE, IDS, room(BYTES), "max_programs is 0"),
    "blocks that share memory": (CACHE[:1].expand(4, 32), IDS, room(BYTES), "share memory"),
}


@pytest.mark.parametrize("place", ["host", "interpreter"])
@pytest.mark.parametrize("what", REFUSED)
def test_invalid_arguments_are_refused(what: str, place: str) -> None:
    cache, ids, packed, words = REFUSED[what]
    options = {"max_programs": 0} if what == "no programs" else {}
    was = CACHE.clone()
    with running_at(place), pytest.raises(ValueError, match=words):
        gather_blocks(cache, ids, packed, **options)
    assert torch.equal(CACHE, was)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("end", ["first", "last"])
def test_a_byte_shared_with_any_layer_is_refused(layer: int, end: str) -> None:
    memory = torch.zeros(4 * 1024, dtype=torch.uint8)
    starts = [1024, 2048, 3072]
    table = layer_table([memory[at : at + 256].view(2, 128) for at in starts])
    size = 3 * 128
    at = starts[layer] - size + 1 if end == "first" else starts[layer] + 255
    with pytest.raises(ValueError, match="share memory"):
        gather_blocks(table, torch.tensor([0]), memory[at : at + size])
    free = at - 1 if end == "first" else at + 1
    gather_blocks(table, torch.tensor([0]), memory[free : free + size])


def test_a_slice_checks_the_memory_of_its_own_layers_only() -> None:
    table = layer_table([torch.zeros((2, 128), dtype=torch.uint8) for _ in range(3)])
    ids, last = torch.tensor([1]), table.caches[2].view(-1)
    gather_blocks(table[:2], ids, last)
    with pytest.raises(ValueError, match="share memory"):
        gather_blocks(table[1:], ids, last)


def test_a_table_has_one_geometry_and_one_device() -> None:
    with pytest.raises(ValueError, match="one cache or more"):
        layer_table([])
    for other in (CACHE[:3], CACHE[:, :16], torch.empty_like(CACHE, device="meta")):
        with pytest.raises(ValueError, match="cache 1 differs"):
            layer_table([CACHE, other])
    with pytest.raises(ValueError, match="none of the 2 layers"):
        layer_table([CACHE, CACHE.clone()])[2:]


@pytest.mark.gpu
def test_devices_are_not_mixed() -> None:
    cache = CACHE.cuda()
    out = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    for ids, packed in ((IDS, out), (IDS.cuda(), out.cpu())):
        with pytest.raises(ValueError, match="on cpu"):
            gather_blocks(cache, ids, packed)
    with pytest.raises(ValueError, match="stream"):
        gather_blocks(CACHE, IDS, out.cpu(), stream=torch.cuda.Stream())


@pytest.mark.gpu
def test_unknown_ids_are_skipped_on_a_gpu() -> None:
    cache = CACHE.cuda()
    ids = torch.tensor([-1, 3, 4, 2**40], device="cuda")
    out = torch.full((4, 32), -7, dtype=torch.int32, device="cuda")
    gather_blocks(cache, ids, out)
    assert torch.equal(out[1], cache[3])
    assert bool((out[[0, 2, 3]] == -7).all())
