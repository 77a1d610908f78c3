"""Checksums of parts of a cache against zlib's, over any layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerpush_kernels import checksum_parts
from tests.unit.kernels.arena import Guarded, guarded, poisoned_bytes
from tests.unit.kernels.caches import DTYPES
from tests.unit.kernels.places import KERNEL_PLACES, running_at

Part = tuple[int, int, int]
CACHE = torch.arange(4 * 2 * 16 * 8, dtype=torch.int16).view(4, 2, 16, 8)
PARTS = torch.tensor([[2, 0, 16], [0, 5, 3]], dtype=torch.int32)


def reference(cache: torch.Tensor, parts: Sequence[Part]) -> list[int]:
    """Slow and obvious."""
    return [
        zlib.adler32(cache[block, :, first : first + tokens].contiguous().cpu().view(torch.uint8).numpy().tobytes())
        for block, first, tokens in parts
    ]


def taken(cache: torch.Tensor, parts: Sequence[Part], most: int = 100) -> list[int]:
    """From the kernel, into poisoned memory. No other memory changes there."""
    out = poisoned_bytes(8 * len(parts), cache.device)
    sums, where = out.tensor.view(torch.int64), torch.tensor(parts, dtype=torch.int32, device=cache.device)
    checksum_parts(cache, where.view(-1, 3), sums, max_programs=most)
    untouched = poisoned_bytes(8 * len(parts), cache.device)
    untouched.tensor.copy_(out.tensor)
    assert torch.equal(out.memory, untouched.memory)
    return [int(each) for each in sums]


@dataclass(frozen=True)
class Case:
    """A cache ``[blocks, heads, tokens, content]``, and parts of it."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    dtype: torch.dtype
    offset: int
    parts: list[Part]
    most: int
    seed: int

    def place(self, device: torch.device) -> Guarded:
        return guarded(self.shape, self.strides, self.dtype, device, offset=self.offset, seed=self.seed)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Head by head or token by token, with gaps or without. A part may have many tiles, or one byte."""
    dtype = draw(st.sampled_from(DTYPES))
    sizes = {
        "content": draw(st.one_of(st.sampled_from([64, 128, 576]), st.integers(1, 700))),
        "tokens": draw(st.sampled_from([1, 3, 16, 32])),
        "heads": draw(st.integers(1, 4)),
        "block": draw(st.integers(1, 5)),
    }
    inner = draw(st.permutations(["tokens", "heads"]))
    strides, reach = {"content": 1}, sizes["content"]
    for name in (*inner, "block"):
        strides[name] = reach + draw(st.sampled_from([0, 0, 1, 8, 16]))
        reach = strides[name] * sizes[name]
    order = ("block", "heads", "tokens", "content")
    parts = []
    for _ in range(draw(st.integers(0, 5))):
        first = draw(st.integers(0, sizes["tokens"] - 1))
        number = draw(st.integers(1, sizes["tokens"] - first))
        parts.append((draw(st.integers(0, sizes["block"] - 1)), first, number))
    shape, steps = tuple(sizes[name] for name in order), tuple(strides[name] for name in order)
    offset, seed = draw(st.integers(0, 16)) * dtype.itemsize, draw(st.integers(0, 2**31))
    return Case(shape, steps, dtype, offset, parts, draw(st.integers(1, 9)), seed)


@pytest.mark.parametrize("place", KERNEL_PLACES)
@settings(max_examples=50)
@given(case=cases())
def test_checksums_are_those_of_zlib(place: str, case: Case) -> None:
    with running_at(place) as device:
        cache = case.place(device)
        before = cache.clone()
        assert taken(cache.tensor, case.parts, case.most) == reference(cache.tensor, case.parts)
        assert torch.equal(cache.memory, before.memory)


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_large_sums_do_not_overflow(place: str) -> None:
    """A mebibyte of the largest bytes: 16 of them already have a weighted sum of 33 bits."""
    with running_at(place) as device:
        cache = torch.full((1, 1, 1, 1 << 20), 0xFF, dtype=torch.uint8, device=device)
        assert taken(cache, [(0, 0, 1)]) == reference(cache, [(0, 0, 1)])


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_parts_outside_the_cache_are_not_read(place: str) -> None:
    far = 2**31 - 1
    strange = [(-1, 0, 1), (4, 0, 1), (far, 0, 1), (1, -1, 1), (1, 0, 17), (1, 15, 2), (1, far, 1), (1, 0, 0)]
    with running_at(place) as device:
        cache = CACHE.to(device)
        assert taken(cache, [*strange, (1, 15, 1)]) == [1] * len(strange) + reference(cache, [(1, 15, 1)])


REFUSED = {
    "three dimensions": (CACHE[0], PARTS, PARTS.new_zeros(2).long(), "has no contiguous content"),
    "content with gaps": (CACHE[..., ::2], PARTS, PARTS.new_zeros(2).long(), "has no contiguous content"),
    "large blocks": (CACHE.new_empty((0, 1, 1 << 20, 1 << 8)), PARTS, PARTS, "has more than"),
    "other parts": (CACHE, PARTS.long(), PARTS.new_zeros(2).long(), r"int32 \[n, 3\], not torch.int64"),
    "parts with gaps": (CACHE, PARTS.repeat(2, 1)[::2], PARTS.new_zeros(2).long(), r"contiguous int32 \[n, 3\]"),
    "a narrow result": (CACHE, PARTS, PARTS.new_zeros(2), "int64, not torch.int32"),
    "a short result": (CACHE, PARTS, PARTS.new_zeros(1).long(), r"2 parts need contiguous int64, .* \[1\]"),
    "another device": (CACHE, PARTS, PARTS.new_zeros(2, device="meta").long(), "checksums on meta"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_arguments_are_refused(what: str) -> None:
    cache, parts, out, words = REFUSED[what]
    with running_at("interpreter"), pytest.raises(ValueError, match=words):
        checksum_parts(cache, parts, out)


def test_no_programs_are_refused() -> None:
    with pytest.raises(ValueError, match="max_programs is 0"):
        checksum_parts(CACHE, PARTS, PARTS.new_zeros(2).long(), max_programs=0)
