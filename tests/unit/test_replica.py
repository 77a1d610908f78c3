"""The parts of ranks with equal KV: together they are all blocks, and no block is in two of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.replica import STRIPE, Replica
from layerpush.core.step_plan import ChunkPlan, GroupSlice
from layerpush.prefill.ready_blocks import ReadyBlocks


@given(count=st.integers(1, 16), blocks=st.integers(0, 300))
def test_each_block_has_one_owner(count: int, blocks: int) -> None:
    ranks = [Replica(index, count) for index in range(count)]
    owners = [[rank.index for rank in ranks if rank.owns(block)] for block in range(blocks)]
    assert all(len(each) == 1 for each in owners)
    for rank in ranks:
        assert rank.owned_before(blocks) == sum(each == [rank.index] for each in owners)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_chunk_of_32_blocks_has_equal_parts(count: int) -> None:
    assert {Replica(index, count).owned_before(32) for index in range(count)} == {32 // count}


@given(count=st.integers(1, 4), chunks=st.lists(st.integers(1, 3 * STRIPE), min_size=1, max_size=4), data=st.data())
def test_ranks_send_each_registered_block_once_and_count_its_bytes(
    count: int, chunks: list[int], data: st.DataObject
) -> None:
    """Whatever the chunks are, and however many blocks the decode engine has already."""
    total = sum(chunks)
    targets = tuple(range(1000, 1000 + data.draw(st.integers(1, total))))
    sent: list[tuple[int, int]] = []
    for index in range(count):
        rank, own = ReadyBlocks([0], [64], by_layer=True), list[tuple[int, int]]()
        first = 0
        for number, size in enumerate(chunks):
            table = tuple(range(first + 1, first + size + 1))
            rank.plan(ChunkPlan("r", 0, number, first, first + size, total, (GroupSlice(first, table, total),)))
            if number == 0:
                rank.align([targets], [Replica(index, count)])
            rank.ready(number, 0)
            own += [pair for part in rank.pending() for pair in zip(part.source, part.target, strict=True)]
            rank.take_pending()
            first += size
        assert rank.planned_bytes == 64 * len(own)
        sent += own
    skipped = total - len(targets)
    assert sorted(sent) == [(skipped + block + 1, 1000 + block) for block in range(len(targets))]
