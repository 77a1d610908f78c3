"""Kept turns hold their blocks until every rank has ended them. They give way to requests, oldest first."""

from __future__ import annotations

from layerpush.engine.scheduler.turn_protocol import Free, RankEnded
from layerpush.engine.scheduler.turns import LEAVING_S, SPARE_PART, Turns
from tests.unit.builders import BlockPool

SPARE = 10


def kept(ranks: int = 1, **blocks: range) -> tuple[Turns, BlockPool]:
    pool = BlockPool(SPARE * SPARE_PART)
    turns = Turns(pool, ranks)
    for name, each in blocks.items():
        turns.keep(name, each)
    return turns, pool


def counts(pool: BlockPool) -> list[int]:
    """The references to the first blocks."""
    return [block.ref_cnt for block in pool.blocks[:6]]


def test_blocks_are_held_until_every_rank_has_ended_the_turn() -> None:
    turns, pool = kept(2, a=range(4), b=range(2, 6))
    for rank in (0, 0):
        assert turns.handle("a", RankEnded(rank)) == []
    assert counts(pool) == [1, 1, 2, 2, 1, 1]
    assert turns.handle("a", RankEnded(1)) == [Free()]
    assert counts(pool) == [0, 0, 1, 1, 1, 1], "another turn has these, too"
    assert turns.handle("unknown", RankEnded(0)) == []
    assert ("a" in turns, "b" in turns) == (False, True)


def test_turns_stay_while_enough_blocks_are_free() -> None:
    turns, _ = kept(a=range(4), b=range(4, 8))
    assert turns.give_way(SPARE, 0.0, short=False) == []
    assert not turns.needs_steps


def test_the_oldest_give_way_until_enough_blocks_are_free() -> None:
    turns, _ = kept(a=range(4), b=range(4, 8), c=range(8, 12))
    assert turns.give_way(SPARE - 5, 0.0, short=False) == ["a", "b"]
    assert turns.needs_steps
    assert turns.give_way(SPARE - 5, 0.0, short=False) == [], "these are on their way"
    assert turns.give_way(SPARE - 9, 0.0, short=False) == ["c"]
    turns.handle("a", RankEnded(0))
    assert turns.give_way(0, 0.0, short=True) == []


def test_blocks_that_others_have_do_not_become_free() -> None:
    """A conversation's turns share their first blocks, and so may a request that runs."""
    turns, pool = kept(a=range(4), b=range(6), c=range(6, 12), d=range(12, 18))
    pool.touch(pool.blocks[4:6])
    assert turns.give_way(SPARE - 3, 0.0, short=False) == ["a", "b"], "four blocks, with the second turn"
    assert turns.give_way(SPARE - 4, 0.0, short=False) == []
    assert turns.give_way(SPARE - 5, 0.0, short=False) == ["c"]


def test_a_request_waits_until_a_block_becomes_free() -> None:
    turns, _ = kept(a=range(4), b=range(6), c=range(6, 9))
    assert turns.give_way(50, 0.0, short=True) == ["a", "b"]


def test_they_give_way_one_by_one_to_a_request_that_waits() -> None:
    turns, pool = kept(a=range(4), b=range(4, 8))
    for name in ("a", "b"):
        assert turns.give_way(50, 0.0, short=True) == [name]
        assert turns.give_way(50, 0.0, short=True) == []
        turns.handle(name, RankEnded(0))
    assert turns.give_way(50, 0.0, short=True) == []
    assert pool.owned == []


def test_a_returned_turn_does_not_give_way() -> None:
    turns, _ = kept(a=range(4), b=range(4, 8))
    turns.handle("a", RankEnded(0))
    assert turns.give_way(SPARE - 1, 0.0, short=False) == ["b"]


def test_a_turn_that_cannot_end_stops_no_other_from_giving_way() -> None:
    """A WRITE reads it that does not end."""
    turns, _ = kept(a=range(4), b=range(4, 8))
    assert turns.give_way(50, 0.0, short=True) == ["a"]
    assert turns.give_way(50, LEAVING_S - 0.1, short=True) == []
    assert turns.give_way(50, LEAVING_S, short=True) == ["b"]
    assert turns.give_way(0, 3 * LEAVING_S, short=True) == []


def test_blocks_are_lent_for_a_moment() -> None:
    turns, pool = kept(a=range(4), b=range(2, 6))
    turns.release(0.0)
    with turns.lent():
        assert pool.owned == []
    assert counts(pool) == [1, 1, 2, 2, 1, 1]
