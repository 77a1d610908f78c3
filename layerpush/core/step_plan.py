"""Which blocks an engine step completes, and where they belong on the decode side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from layerpush.core.config import PushMode

NULL_BLOCK = 0
"""vLLM's placeholder in block tables: it holds nobody's KV and is never sent."""


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """Blocks ``[first, first + len(blocks))`` of one request in one KV cache group.

    ``blocks`` are the prefill engine's block ids in token order, ``total`` is how many blocks the whole prompt has.
    """

    first: int
    blocks: tuple[int, ...]
    total: int

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What one engine step completes of one prompt.

    ``index`` counts the chunks of an epoch. The step computes tokens ``[start, end)``; ``groups`` holds the blocks
    that are complete after it and were not before, including prefix-cache hits, which the previous step may still
    be computing. The last chunk also holds the partly filled last block. A chunk that does not ``streams`` is only
    watched: its prompt is pushed whole. ``mode`` is what the request chose; None: the engine's configuration decides.
    """

    request_id: str
    epoch: int
    index: int
    start: int
    end: int
    prompt_tokens: int
    groups: tuple[GroupSlice, ...]
    streams: bool = True
    mode: PushMode | None = None

    @property
    def final(self) -> bool:
        return self.end >= self.prompt_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step does for pushes: ``preempted`` requests lost their blocks before it runs."""

    chunks: tuple[ChunkPlan, ...] = ()
    preempted: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chunks or self.preempted)


@dataclass(slots=True)
class PromptProgress:
    """How far the plans of one prompt have come. Lives in the scheduler, one per request."""

    request_id: str
    block_sizes: tuple[int, ...]
    streams: bool = True
    mode: PushMode | None = None
    epoch: int = 0
    chunks: int = 0
    planned_tokens: int = 0
    planned_blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planned_blocks = [0] * len(self.block_sizes)

    def restart(self) -> None:
        """The request was preempted: its blocks are gone, so everything is to be planned again."""
        self.epoch += 1
        self.chunks = self.planned_tokens = 0
        self.planned_blocks = [0] * len(self.block_sizes)

    def advance(
        self, start: int, scheduled: int, prompt_tokens: int, tables: Sequence[Sequence[int]]
    ) -> ChunkPlan | None:
        """Plan the step that computes tokens ``[start, start + scheduled)``; None when it adds no prompt token.

        ``tables`` holds the request's whole block table of each group. A step that begins before what was planned
        means that computed tokens were thrown away: everything is planned again, in a new epoch.
        """
        if start < min(self.planned_tokens, prompt_tokens):
            self.restart()
        end = min(start + scheduled, prompt_tokens)
        if end <= start or end <= self.planned_tokens:
            return None
        groups = []
        for group, (size, table) in enumerate(zip(self.block_sizes, tables, strict=True)):
            total = _blocks(prompt_tokens, size)
            first = self.planned_blocks[group]
            upto = total if end == prompt_tokens else end // size
            groups.append(GroupSlice(first, tuple(table[first:upto]), total))
            self.planned_blocks[group] = upto
        chunk = ChunkPlan(
            self.request_id,
            self.epoch,
            self.chunks,
            start,
            end,
            prompt_tokens,
            tuple(groups),
            self.streams,
            self.mode,
        )
        self.chunks += 1
        self.planned_tokens = end
        return chunk


@dataclass(frozen=True, slots=True)
class Alignment:
    """Where a prompt's blocks of one group go: the decode engine registered only its last ``len(targets)`` blocks."""

    total: int
    targets: tuple[int, ...]

    @property
    def skipped(self) -> int:
        """How many leading blocks the decode engine has already, from its prefix cache."""
        return self.total - len(self.targets)

    def target(self, index: int) -> int | None:
        """The decode engine's block for the prompt's ``index``-th block; None when it wants none."""
        return None if index < self.skipped else self.targets[index - self.skipped]


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
