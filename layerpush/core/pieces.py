"""Pieces of blocks, for two engines whose block sizes differ. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerpush.core.wire import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class Pieces:
    """Blocks of both engines, cut into pieces of ``tokens`` tokens: the greatest common divisor of their kernel blocks.

    ``ours`` and ``theirs`` are the pieces in a block of a scheduler, here and on the decode engine; ``our_kernel`` and
    ``their_kernel`` those in a kernel block. ``rows`` holds for each slot the number of a piece's descriptors: one for
    each head, or 1 if a piece is contiguous on both sides.
    """

    tokens: int
    ours: int
    theirs: int
    our_kernel: int
    their_kernel: int
    rows: tuple[int, ...]


def pieces_of(blocks: Sequence[int], count: int) -> list[int]:
    """The ids of the pieces of ``blocks``, ``count`` in each. With two in a block, ``[2]`` becomes ``[4, 5]``. All
    pieces of the null block are null.
    """
    if count == 1:
        return list(blocks)
    return [0 if block == NULL_BLOCK else block * count + part for block in blocks for part in range(count)]
