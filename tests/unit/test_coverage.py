"""The bitmaps that a completion rests on, against sets of cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.write import MismatchError
from layerpush.prefill.coverage import Coverage, CoverageError, check_blocks

Cell = tuple[int, int]
Box = tuple[int, int, int, int]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[tuple[str, Box]]]:
    """Layers with their block counts and with those that are kept, and posts and landings of boxes, some of blocks
    outside of their layer.
    """
    rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    kept = [draw(st.integers(0, count)) for count in rows]
    moves = []
    for _ in range(draw(st.integers(0, 14)) if any(rows) else 0):
        top = draw(st.integers(0, len(rows) - 1))
        left = draw(st.integers(0, max(rows) - 1))
        box = (top, draw(st.integers(top + 1, len(rows))), left, draw(st.integers(left + 1, max(rows))))
        moves.append((draw(st.sampled_from(["post", "land"])), box))
    return rows, kept, moves


def cells_of(box: Box) -> set[Cell]:
    top, bottom, left, right = box
    return {(layer, block) for layer in range(top, bottom) for block in range(left, right)}


@given(boxes())
def test_coverage_agrees_with_a_model_of_sets(case: tuple[list[int], list[int], list[tuple[str, Box]]]) -> None:
    rows, kept, moves = case
    everything = {(layer, block) for layer, count in enumerate(rows) for block in range(count)}
    before = {(layer, block) for layer, block in everything if block < kept[layer]}
    coverage, posted, landed = Coverage(rows, kept), before, {*before}
    assert coverage.full == (landed == everything)
    assert coverage.has_landed(kept)
    for kind, box in moves:
        cells = cells_of(box)
        legal = cells <= everything - posted if kind == "post" else cells <= posted - landed
        arguments = (slice(box[0], box[1]), box[2], box[3])
        if legal:
            (coverage.post if kind == "post" else coverage.land)(*arguments)
            (posted if kind == "post" else landed).update(cells)
        else:
            with pytest.raises(CoverageError):
                (coverage.post if kind == "post" else coverage.land)(*arguments)
        assert coverage.full == (landed == everything)
        firsts = {(layer, 0) for layer, count in enumerate(rows) if count}
        assert coverage.has_landed([1] * len(rows)) == (firsts <= landed)


@pytest.mark.parametrize("targets", [[(1, 2), ()], [(), (7,)]])
def test_a_group_without_the_last_block_is_refused(targets: list[tuple[int, ...]]) -> None:
    """A stock D wants no block of a group if attention chunks divide the prompt evenly. Its answer would be wrong."""
    with pytest.raises(MismatchError, match="cannot compute the last token"):
        check_blocks([2, 2], targets)


def test_a_group_without_source_blocks_needs_no_target_blocks() -> None:
    check_blocks([2, 0], [(1, 2), ()])
    check_blocks([2, 2], [(), ()])
