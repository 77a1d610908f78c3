"""Small worlds for the pure tests: prompts with block tables, registrations, layouts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerpush.core.layout import CacheLayout, LayerSlots, Region
from layerpush.core.step_plan import ChunkPlan, PromptProgress
from layerpush.core.wire import Registration
from layerpush.prefill.pushes import Pushes


@dataclass
class CountedBlock:
    ref_cnt: int = 0


class BlockPool:
    """vLLM's, as far as it counts the owners of blocks."""

    def __init__(self, size: int) -> None:
        self.blocks = [CountedBlock() for _ in range(size)]

    def touch(self, blocks: Sequence[CountedBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[CountedBlock]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "freed twice"

    @property
    def owned(self) -> list[int]:
        """The blocks with an owner."""
        return [number for number, block in enumerate(self.blocks) if block.ref_cnt]


def registration(
    *groups: Sequence[int],
    request_id: str = "d-1",
    engine: str = "D",
    layerpush: int = 0,
    prefill: str | None = None,
    sampling: str | None = None,
    number: int = 0,
) -> Registration:
    return Registration(
        request_id=request_id,
        decode_engine_id=engine,
        decode_host="127.0.0.1",
        decode_port=1,
        decode_tp_size=1,
        local_block_ids=tuple(tuple(group) for group in groups),
        layerpush=layerpush,
        prefill_request_id=prefill,
        sampling=sampling,
        number=number,
    )


def blocks_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def table_of(tokens: int, block_size: int, first: int = 1) -> list[int]:
    """A block table of consecutive ids, none of them the null block."""
    return list(range(first, first + blocks_of(tokens, block_size)))


def chunks_of(
    tokens: int,
    steps: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_sizes: Sequence[int],
    progress: PromptProgress | None = None,
    start: int = 0,
    request_id: str = "p-1",
) -> list[ChunkPlan]:
    """Chunk plans of a prompt that is computed in steps of these sizes; the last size repeats.

    As in the engine, a step sees only the blocks that are allocated so far.
    """
    progress = progress or PromptProgress(request_id, tuple(block_sizes))
    plans = []
    sizes = list(steps)
    while start < tokens:
        size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], tokens - start)
        seen = [table[: blocks_of(start + size, bs)] for table, bs in zip(tables, block_sizes, strict=True)]
        plan = progress.advance(start, size, tokens, seen)
        assert plan is not None
        plans.append(plan)
        start += size
    return plans


def vllm_pairs(prefill_blocks: Sequence[int], decode_blocks: Sequence[int]) -> list[tuple[int, int]]:
    """vLLM's rule for a whole push: the decode engine's blocks are the prompt's last ones."""
    if not decode_blocks:
        return []
    return list(zip(prefill_blocks[-len(decode_blocks) :], decode_blocks, strict=True))


def layout_of(groups: Sequence[int], blocks: int = 64, block_bytes: int = 32, kernel_blocks: int = 1) -> CacheLayout:
    """One region for every layer."""
    span = blocks * block_bytes
    regions = tuple(Region(0x1000 + index * span, block_bytes, blocks) for index in range(len(groups)))
    layers = tuple(LayerSlots(f"layers.{index}", group, (index,), kernel_blocks) for index, group in enumerate(groups))
    return CacheLayout(layers, regions)


def wait_at_random(writer: Pushes, draw: random.Random) -> None:
    """Ready layers wait or leave by chance: any decision of a schedule must be safe."""
    writer._schedule.waits = lambda _: draw.random() < 0.5
