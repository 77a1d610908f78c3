"""The order in which a prompt's blocks are handed out. Sessions test the rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.pieces import Pieces
from layerpush.core.replica import Replica
from layerpush.core.step_plan import ChunkPlan, GroupSlice, whole_prompt
from layerpush.core.wire import NULL_BLOCK
from layerpush.prefill.ready_blocks import ReadyBlocks
from tests.unit.builders import chunks_of

LAYERS = 96
BLOCKS = tuple(range(5, 9))


def four_blocks() -> ReadyBlocks:
    """One chunk of four blocks, known on both sides."""
    made = ReadyBlocks([0] * LAYERS, [64] * LAYERS, by_layer=True)
    made.plan(ChunkPlan("r", 0, 0, 0, 64, 64, (GroupSlice(0, BLOCKS, len(BLOCKS)),)))
    made.align([BLOCKS])
    return made


def test_layers_come_in_model_order_in_spite_of_their_ready_order() -> None:
    made = four_blocks()
    for layer in (80, 3, 81, 64, 4):
        made.ready(0, layer)
    assert [(part.layers.start, part.layers.stop) for part in made.pending()] == [(3, 5), (64, 65), (80, 82)]


def test_taken_layers_do_not_come_again() -> None:
    made = four_blocks()
    made.ready(0, 3)
    made.take_pending()
    made.ready(0, 3)
    assert made.pending() == ()
    made.ready(0, 4)
    assert [(part.layers.start, part.source) for part in made.pending()] == [(4, BLOCKS)]


def test_a_layer_that_is_ready_twice_counts_once() -> None:
    made = four_blocks()
    for _ in range(LAYERS):
        made.ready(0, 3)
    assert not made.is_complete


def test_null_blocks_are_not_handed_out() -> None:
    """Neither engine keeps the blocks before a window."""
    made = ReadyBlocks([0], [64], by_layer=True)
    made.plan(ChunkPlan("r", 0, 0, 0, 64, 64, (GroupSlice(0, (NULL_BLOCK, 6, 7, 8), 4),)))
    made.align([(1, 2, NULL_BLOCK, 4)])
    made.ready(0, 0)
    (part,) = made.pending()
    assert (part.source, part.target) == ((6, 8), (2, 4))


def test_a_layer_behind_the_others_leaves_what_is_kept() -> None:
    """It is ready in fewer blocks than the decode engine keeps, when the blocks of another layer are taken."""
    chunks = chunks_of(64, [32, 16], [BLOCKS], [16])
    made = ReadyBlocks([0, 0], [64, 64], by_layer=True)
    made.plan(chunks[0])
    made.align([BLOCKS])
    made.keep(0)
    made.rewind()
    for chunk in chunks_of(64, [16, 48], [BLOCKS], [16]):
        made.plan(chunk)
    made.ready(0, 0)
    made.ready(0, 1)
    made.ready(1, 0)
    made.take_pending()
    made.ready(1, 1)
    assert [(part.layers.start, part.first, part.end) for part in made.pending()] == [(1, 2, 4)]


def test_chunk_bytes_sum_over_the_layers_of_each_group() -> None:
    made = ReadyBlocks([0, 0, 1], [64, 64, 8], by_layer=True)
    groups = tuple(GroupSlice(0, BLOCKS, len(BLOCKS)) for _ in range(3))
    made.plan(ChunkPlan("r", 0, 0, 0, 64, 64, groups))
    assert made.planned_bytes == 0
    made.align([BLOCKS, BLOCKS[1:], BLOCKS])
    assert made.planned_bytes == made.chunk_bytes == 4 * 128 + 3 * 8


def test_pending_layers_stay_until_taken() -> None:
    made = four_blocks()
    made.ready(0, 3)
    assert made.pending() == made.pending() != ()


@given(
    st.sampled_from([(1, 2), (2, 1), (4, 1), (1, 3), (3, 2), (2, 3)]),
    st.integers(1, 90),
    st.integers(0, 20),
    st.integers(1, 3),
    st.lists(st.integers(1, 40), max_size=3),
    st.integers(0, 3),
)
def test_pieces_of_other_blocks_cover_each_token_once(
    parts: tuple[int, int], tokens: int, cached: int, ranks: int, steps: list[int], dropped: int
) -> None:
    """Pieces of 4 tokens. D has ``cached`` blocks; vLLM has dropped P's first ``dropped`` ones."""
    ours, theirs = (4 * count for count in parts)
    total, wanted = -(-tokens // theirs), max(1, -(-tokens // theirs) - cached)
    source = [0 if block < dropped else 100 + 2 * block for block in range(-(-tokens // ours))]
    target = [200 + 3 * block for block in range(total)]
    seen: dict[int, int] = {}
    for rank in range(ranks):
        made = ReadyBlocks([0, 0], [ours, ours], by_layer=True)
        begin, ends = 0, [*sorted({step for step in steps if step < tokens}), tokens]
        for index, end in enumerate(ends):
            upto = len(source) if end == tokens else end // ours
            groups = (GroupSlice(begin, tuple(source[begin:upto]), len(source)),)
            made.plan(ChunkPlan("r", 0, index, 0, end, tokens, groups))
            begin = upto
            if index == len(ends) // 2:
                made.align([tuple(target[total - wanted :])], [Replica(rank, ranks)], Pieces(4, *parts, *parts, (1,)))
            made.ready(index, 0)
        segments = made.pending()
        assert made.size(segments) <= made.planned_bytes // 2  # one of two layers
        for part in segments:
            for here, there in zip(part.source, part.target, strict=True):
                block, inside = divmod(here, parts[0])
                token = source.index(block) * ours + 4 * inside
                block, inside = divmod(there, parts[1])
                assert token == target.index(block) * theirs + 4 * inside
                assert token not in seen
                seen[token] = rank
    assert sorted(seen) == list(range(max((total - wanted) * theirs, dropped * ours), tokens, 4))


def test_a_whole_prompt_has_null_blocks_where_vllm_has_dropped_some() -> None:
    chunk = whole_prompt("r", 0, 100, 32, ([1, 2, 3, 4, 9], [7, 8]))
    assert [group.blocks for group in chunk.groups] == [(1, 2, 3, 4), (0, 0, 7, 8)]
    assert chunk.final
