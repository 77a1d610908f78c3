"""The blocks that an engine step completes, and their places in the decode engine's cache. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from layerpush.core.push_mode import PushMode
from layerpush.core.replica import ALONE, Replica
from layerpush.core.wire import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """Blocks ``[first, first + len(blocks))`` of one request in one KV cache group.

    ``blocks`` are the prefill engine's block ids in token order, ``total`` is the number of blocks of the whole prompt.
    """

    first: int
    blocks: tuple[int, ...]
    total: int

    @property
    def end(self) -> int:
        """The index after the last block."""
        return self.first + len(self.blocks)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The blocks of one prompt that one engine step completes, or that were in the prefix cache.

    ``index`` counts the chunks of an epoch. The step computes tokens ``[start, end)``; ``groups`` holds the blocks
    that are complete after it and were not before. The last chunk also holds the partly filled last block. If
    ``whole``, the chunk is only watched: its prompt is pushed whole. ``mode`` is the request's choice; None: the
    engine's configuration decides. The blocks of a ``cached`` chunk were computed by steps before this one.
    ``provisional``: vLLM may take the step back after it has run. The blocks of the first ``filled`` tokens are full
    after it, in every group.
    """

    request_id: str
    epoch: int
    index: int
    start: int
    end: int
    prompt_tokens: int
    groups: tuple[GroupSlice, ...]
    whole: bool = False
    mode: PushMode | None = None
    cached: bool = False
    provisional: bool = False
    filled: int = 0

    @property
    def final(self) -> bool:
        """Whether the chunk ends the prompt."""
        return self.end >= self.prompt_tokens


def whole_prompt(
    request_id: str, epoch: int, tokens: int, block_size: int, tables: Sequence[Sequence[int]]
) -> ChunkPlan:
    """One chunk with the whole prompt. ``tables``: the last of its blocks in each group, if vLLM has dropped others."""
    total = _blocks(tokens, block_size)
    groups = [(NULL_BLOCK,) * (total - len(table)) + tuple(table[:total]) for table in tables]
    return ChunkPlan(request_id, epoch, 0, 0, tokens, tokens, tuple(GroupSlice(0, blocks, total) for blocks in groups))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The chunks of one engine step. ``preempted`` requests lost their blocks before it; steps of ``rewound`` requests
    were taken back before it. No step of the prompts of ``accepted`` requests can be taken back any more.
    """

    chunks: tuple[ChunkPlan, ...] = ()
    preempted: tuple[str, ...] = ()
    rewound: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


@dataclass(slots=True)
class PromptProgress:
    """The part of one prompt that is planned already. The scheduler has one per request.

    ``provisional``: vLLM may take back a step of this epoch. ``rewound``: it has taken one back.
    """

    request_id: str
    block_sizes: tuple[int, ...]
    whole: bool = False
    mode: PushMode | None = None
    epoch: int = 0
    chunks: int = 0
    planned_tokens: int = 0
    provisional: bool = False
    rewound: bool = False
    planned_blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.planned_blocks = [0] * len(self.block_sizes)

    def restart(self) -> None:
        """The request was preempted and lost its blocks: plan the whole prompt again, in a new epoch."""
        self.provisional = False
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.chunks = self.planned_tokens = 0
        self.planned_blocks = [0] * len(self.block_sizes)

    def plan_cached(self, cached: int, prompt_tokens: int, tables: Sequence[Sequence[int]]) -> ChunkPlan | None:
        """Plan the first ``cached`` tokens, which earlier steps computed; None if they fill no block.

        Call it before the first ``advance`` of an epoch. A resumed request may have more cached tokens than its prompt.
        ``tables`` holds its whole block table of each group.
        """
        chunk = self._chunk(0, min(cached, prompt_tokens), prompt_tokens, tables, cached=True)
        if not any(group.blocks for group in chunk.groups):
            return None
        self._count_planned(chunk)
        return chunk

    def advance(
        self, start: int, scheduled: int, prompt_tokens: int, tables: Sequence[Sequence[int]]
    ) -> ChunkPlan | None:
        """Plan the step that computes tokens ``[start, start + scheduled)``; None if it computes no new prompt token.

        If a step begins before the end of the planned tokens, vLLM has dropped computed tokens: the whole prompt is
        planned again, in a new epoch.
        """
        if start < min(self.planned_tokens, prompt_tokens):
            self.rewound = True
            self._begin_epoch()
        end = min(start + scheduled, prompt_tokens)
        if end <= start or end <= self.planned_tokens:
            return None
        chunk = self._chunk(start, end, prompt_tokens, tables)
        self._count_planned(chunk)
        return chunk

    def _chunk(
        self, start: int, end: int, prompt_tokens: int, tables: Sequence[Sequence[int]], *, cached: bool = False
    ) -> ChunkPlan:
        """The blocks that are complete after token ``end`` and not planned yet."""
        groups, filled = [], end
        for first, size, table in zip(self.planned_blocks, self.block_sizes, tables, strict=True):
            total = _blocks(prompt_tokens, size)
            upto = total if end == prompt_tokens else end // size
            filled = min(filled, upto * size)
            groups.append(GroupSlice(first, tuple(table[first:upto]), total))
        return ChunkPlan(
            self.request_id,
            self.epoch,
            self.chunks,
            start,
            end,
            prompt_tokens,
            tuple(groups),
            self.whole,
            self.mode,
            cached,
            self.provisional,
            filled,
        )

    def _count_planned(self, chunk: ChunkPlan) -> None:
        self.chunks += 1
        self.planned_tokens = chunk.end
        self.planned_blocks = [group.end for group in chunk.groups]


@dataclass(frozen=True, slots=True)
class Alignment:
    """Maps a prompt's ``total`` blocks of one group to the decode engine's: block ``i`` to ``targets[i - skipped]``.

    The decode engine registered only the last ``len(targets)`` blocks of the prompt. This rank sends the blocks of its
    ``replica``.
    """

    total: int
    targets: tuple[int, ...]
    replica: Replica = ALONE

    @property
    def skipped(self) -> int:
        """The number of leading blocks that the decode engine has in its prefix cache."""
        return self.total - len(self.targets)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
