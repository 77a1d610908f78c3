"""Answers of this decode engine whose blocks wait for the conversation's next turn. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from layerpush.engine.scheduler.block_holds import BlockPool

SPARE_PART = 8
"""Kept turns give way while less than one of so many parts of the cache is free."""
LEAVING_S = 1.0
"""Seconds for which the blocks of a turn that gives way count as free, although they are not yet."""


@dataclass(slots=True)
class _Turn:
    blocks: list[Any]
    ended: set[int] = field(default_factory=set)
    """Ranks that hold it no more."""


class KeptTurns:
    """A reference of our own to each block of a kept turn, until every rank has ended it: vLLM would step on for ever
    while it holds a request. Oldest first. Runs in the scheduler's thread. ``ranks``: how many report.
    """

    def __init__(self, pool: BlockPool, ranks: int) -> None:
        self._pool = pool
        self._ranks = ranks
        self._turns: dict[str, _Turn] = {}
        self._leaving: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._turns)

    def keep(self, request_id: str, blocks: Iterable[int]) -> None:
        """Hold a turn's ``blocks``, before vLLM frees them."""
        turn = self._turns[request_id] = _Turn([self._pool.blocks[block] for block in blocks])
        self._pool.touch(turn.blocks)

    def turn_ended(self, request_id: str, rank: int) -> None:
        """A rank has returned the turn, or its time is over there."""
        if (turn := self._turns.get(request_id)) is None:
            return
        turn.ended.add(rank)
        if len(turn.ended) == self._ranks:
            del self._turns[request_id]
            self._leaving.pop(request_id, None)
            self._pool.free_blocks(reversed(turn.blocks))

    def to_release(self, free: int, now: float, *, short: bool) -> list[str]:
        """The turns that give way now; each is returned once. ``free`` blocks are free. ``short``: a request waits for
        more than these. A turn that a WRITE reads may stay: after ``LEAVING_S`` seconds others give way in its place.
        """
        leaving = [each for each, since in self._leaving.items() if since > now - LEAVING_S]
        missing = len(self._pool.blocks) // SPARE_PART - free
        missing -= sum(len(self._turns[request_id].blocks) for request_id in leaving)
        released: list[str] = []
        for request_id in [each for each in self._turns if each not in self._leaving]:
            if missing <= 0 and (leaving or released or not short):
                break
            self._leaving[request_id] = now
            released.append(request_id)
            missing -= len(self._turns[request_id].blocks)
        return released
