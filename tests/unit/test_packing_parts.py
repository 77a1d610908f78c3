"""A WRITE that is too large to be packed, in parts: each block of each layer is in exactly one part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.write import Segment, Write
from layerpush.transport.packing.parts import split

LAYER_BYTES = (10, 10, 30, 10, 20, 10)

segments = st.builds(
    lambda start, layers, first, blocks, skipped: Segment(
        slice(start, start + layers),
        0,
        first,
        first + blocks,
        tuple(range(100 + first, 100 + first + blocks)),
        tuple(range(200 + first, 200 + first + blocks)),
        min(skipped, first),
    ),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 5),
)


def moves(write: Write) -> list[tuple[int, int, int, int, int]]:
    return [
        (layer, block, part.source[block - part.first], part.target[block - part.first], part.skipped)
        for part in write.segments
        for layer in range(part.layers.start, part.layers.stop)
        for block in range(part.first, part.end)
    ]


def size_of(write: Write) -> int:
    return sum(LAYER_BYTES[layer] for layer, *_ in moves(write))


@given(st.lists(segments, min_size=1, max_size=4), st.integers(30, 400))
def test_parts_have_all_blocks_and_none_twice(given: list[Segment], limit: int) -> None:
    write = Write(7, 2, 3, 0, tuple(given))
    parts = split(write, LAYER_BYTES, limit)
    assert sorted(move for part in parts for move in moves(part)) == sorted(moves(write))
    for part in parts:
        assert (part.id, part.epoch, part.chunk) == (7, 2, 3)
        assert part.size == size_of(part) <= limit
        assert all(len(each.source) == len(each.target) == each.end - each.first for each in part.segments)


@pytest.mark.parametrize(("limit", "sizes"), [(1000, [360]), (240, [240, 120]), (120, [120, 120, 120]), (60, [60] * 6)])
def test_parts_are_as_large_as_the_limit_allows(limit: int, sizes: list[int]) -> None:
    """12 blocks of 10 bytes in three layers; layers stay whole where they fit."""
    blocks = tuple(range(12))
    write = Write(0, 0, 0, 360, (Segment(slice(0, 3), 0, 0, 12, blocks, blocks),))
    assert [part.size for part in split(write, (10, 10, 10), limit)] == sizes


def test_an_oversized_block_is_a_part_of_its_own() -> None:
    write = Write(0, 0, 0, 90, (Segment(slice(2, 3), 0, 0, 3, (1, 2, 3), (4, 5, 6)),))
    assert [part.size for part in split(write, LAYER_BYTES, 20)] == [30, 30, 30]
