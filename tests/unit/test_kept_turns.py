"""Kept turns hold their blocks until every rank has ended them. They give way to requests, oldest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from layerpush.engine.scheduler.kept_turns import LEAVING_S, SPARE_PART, KeptTurns

SPARE = 10


class Pool:
    """Blocks are numbers."""

    def __init__(self) -> None:
        self.blocks = range(SPARE * SPARE_PART)
        self.held: list[int] = []

    def touch(self, blocks: Sequence[Any]) -> None:
        self.held += blocks

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            self.held.remove(block)


def kept(ranks: int = 1, **blocks: range) -> tuple[KeptTurns, Pool]:
    pool = Pool()
    turns = KeptTurns(pool, ranks)
    for name, each in blocks.items():
        turns.keep(name, each)
    return turns, pool


def test_blocks_are_held_until_every_rank_has_ended_the_turn() -> None:
    turns, pool = kept(2, a=range(4), b=range(2, 6))
    for rank in (0, 0):
        turns.turn_ended("a", rank)
    assert sorted(pool.held) == [0, 1, 2, 2, 3, 3, 4, 5]
    turns.turn_ended("a", 1)
    assert sorted(pool.held) == [2, 3, 4, 5], "another turn has these, too"
    turns.turn_ended("unknown", 0)
    assert list(turns) == ["b"]
    assert len(turns) == 1


def test_turns_stay_while_enough_blocks_are_free() -> None:
    turns, _ = kept(a=range(4), b=range(4))
    assert turns.to_release(SPARE, 0.0, short=False) == []


def test_the_oldest_give_way_until_enough_blocks_are_free() -> None:
    turns, _ = kept(a=range(4), b=range(4), c=range(4))
    assert turns.to_release(SPARE - 5, 0.0, short=False) == ["a", "b"]
    assert turns.to_release(SPARE - 5, 0.0, short=False) == [], "these are on their way"
    assert turns.to_release(SPARE - 9, 0.0, short=False) == ["c"]
    turns.turn_ended("a", 0)
    assert turns.to_release(0, 0.0, short=True) == []


def test_they_give_way_one_by_one_to_a_request_that_waits() -> None:
    turns, pool = kept(a=range(4), b=range(4))
    for name in ("a", "b"):
        assert turns.to_release(50, 0.0, short=True) == [name]
        assert turns.to_release(50, 0.0, short=True) == []
        turns.turn_ended(name, 0)
    assert turns.to_release(50, 0.0, short=True) == []
    assert pool.held == []


def test_a_returned_turn_does_not_give_way() -> None:
    turns, _ = kept(a=range(4), b=range(4))
    turns.turn_ended("a", 0)
    assert turns.to_release(SPARE - 1, 0.0, short=False) == ["b"]


def test_a_turn_that_cannot_end_stops_no_other_from_giving_way() -> None:
    """A WRITE reads it that does not end."""
    turns, _ = kept(a=range(4), b=range(4))
    assert turns.to_release(50, 0.0, short=True) == ["a"]
    assert turns.to_release(50, LEAVING_S - 0.1, short=True) == []
    assert turns.to_release(50, LEAVING_S, short=True) == ["b"]
    assert turns.to_release(0, 3 * LEAVING_S, short=True) == []
