"""Prefill ranks with equal KV share the blocks of a decode rank: each block is sent once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

STRIPE = 4
"""Neighbouring blocks that one rank sends: they merge into one transfer. A chunk of 32 blocks has work for 8 ranks."""


@dataclass(frozen=True, slots=True)
class Replica:
    """This rank is number ``index`` of ``count`` prefill ranks that hold the same KV for one decode rank, in one KV
    cache group.

    It sends the blocks that it owns. Blocks are counted from the first one that the decode engine registered. So each
    rank knows its blocks from the registration alone, and they are the same by layer and in a whole push.
    """

    index: int = 0
    count: int = 1

    def owns(self, block: int) -> bool:
        """Whether this rank sends the block."""
        return block // STRIPE % self.count == self.index

    def owned_before(self, end: int) -> int:
        """The number of blocks in ``[0, end)`` that this rank sends."""
        rounds, rest = divmod(end, STRIPE * self.count)
        return rounds * STRIPE + min(STRIPE, max(0, rest - self.index * STRIPE))


ALONE = Replica()
"""No other prefill rank has the KV of this one."""
