"""What layerpush must know of the KV cache of one group of layers. Pure.

``compat/kinds.py`` makes it from vLLM's specification.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Ranks = Literal["heads", "same"]

WHOLE_PROMPT = sys.maxsize
"""The block size of layers with a state: one block, complete at the end of the prompt."""


def _from_the_start(_: int) -> int:
    return 0


def in_window(tokens: int) -> Callable[[int], int]:
    """The first position that a token attends to, by its own: a sliding window of ``tokens``, its own included."""
    return lambda position: max(0, position - tokens + 1)


def in_chunk(tokens: int) -> Callable[[int], int]:
    """The same for attention inside chunks of ``tokens``."""
    return lambda position: position - position % tokens


def _unchanged(table: list[int]) -> list[int]:
    return table


@dataclass(frozen=True, slots=True)
class KvKind:
    """The KV cache of one group of layers.

    ``block_tokens`` is the number of tokens in a block; ``WHOLE_PROMPT`` for a state. ``first_attended`` maps the
    position of a token to the first position that it attends to. ``transfer_blocks`` takes a request's block ids in
    token order and returns those that are transferred. ``ranks`` is the difference between tensor parallel ranks: each
    has other heads, or all have the same; None: another one. ``never_gathered`` is the reason why the WRITEs of such a
    cache are never gathered, or None.
    """

    block_tokens: int
    is_state: bool = False
    first_attended: Callable[[int], int] = _from_the_start
    transfer_blocks: Callable[[list[int]], list[int]] = _unchanged
    ranks: Ranks | None = None
    never_gathered: str | None = None

    @property
    def has_window(self) -> bool:
        """Whether tokens do not attend to all tokens before them."""
        return self.first_attended is not _from_the_start

    def blocks_between(self, table: Sequence[int], start: int, end: int) -> Sequence[int]:
        """The blocks of ``table`` that hold tokens ``[start, end)``. A state belongs to every token."""
        return table if self.is_state else table[start // self.block_tokens : -(-end // self.block_tokens)]

    def blocks_dropped_after(self, tokens: int) -> range:
        """Indices of the blocks that the last of ``tokens`` tokens attends to, and the token after it does not."""
        first, after = (self.first_attended(position) // self.block_tokens for position in (tokens - 1, tokens))
        return range(first, after)
