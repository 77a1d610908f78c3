"""The bitmaps that a completion rests on, against sets of cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.coverage import Coverage, CoverageError

Cell = tuple[int, int]
Box = tuple[int, int, int, int]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, Box]]]:
    """Layers with their block counts, and posts and landings of boxes of layers that have equal counts."""
    count, layers = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rows = [count] * layers
    moves = []
    for _ in range(draw(st.integers(0, 14))):
        top = draw(st.integers(0, layers - 1))
        left = draw(st.integers(0, count - 1))
        box = (top, draw(st.integers(top + 1, layers)), left, draw(st.integers(left + 1, count)))
        moves.append((draw(st.sampled_from(["post", "land"])), box))
    return rows, moves


def cells_of(box: Box) -> set[Cell]:
    top, bottom, left, right = box
    return {(layer, block) for layer in range(top, bottom) for block in range(left, right)}


@given(boxes())
def test_it_counts_like_sets(case: tuple[list[int], list[tuple[str, Box]]]) -> None:
    rows, moves = case
    everything = {(layer, block) for layer, count in enumerate(rows) for block in range(count)}
    coverage, posted, landed = Coverage(rows), set[Cell](), set[Cell]()
    for kind, box in moves:
        cells = cells_of(box)
        legal = not cells & posted if kind == "post" else cells <= posted and not cells & landed
        arguments = (slice(box[0], box[1]), box[2], box[3])
        if legal:
            (coverage.post if kind == "post" else coverage.land)(*arguments)
            (posted if kind == "post" else landed).update(cells)
        else:
            with pytest.raises(CoverageError):
                (coverage.post if kind == "post" else coverage.land)(*arguments)
        assert coverage.full == (landed == everything)


def test_layers_may_want_different_numbers_of_blocks() -> None:
    coverage = Coverage([3, 1, 0])
    for layer, count in ((0, 3), (1, 1)):
        assert not coverage.full
        coverage.post(slice(layer, layer + 1), 0, count)
        coverage.land(slice(layer, layer + 1), 0, count)
    assert coverage.full


def test_nothing_wanted_is_full() -> None:
    assert Coverage([0, 0]).full


def test_a_block_that_nobody_wants_cannot_be_posted() -> None:
    with pytest.raises(CoverageError, match="layers 1-1, blocks 1-1"):
        Coverage([2, 1]).post(slice(1, 2), 1, 2)
