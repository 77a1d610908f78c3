"""The order in which a prompt's blocks are handed out. Sessions test the rest."""

from __future__ import annotations

from layerpush.core.step_plan import ChunkPlan, GroupSlice
from layerpush.prefill.ready_blocks import ReadyBlocks

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
