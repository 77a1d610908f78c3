"""Blocks of a prompt's last token that vLLM drops before they are pushed.

After prefill vLLM keeps the blocks that the next token attends to. A decode engine may compute the last token again. In
layers with a window, or with chunked attention, that token may attend to earlier blocks. Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerpush.core.wire import NULL_BLOCK
from layerpush.engine.scheduler.block_holds import BlockPool

DroppedBlocks = Sequence[range]
"""For each KV cache group, the indices of the prompt's blocks that the last token needs and the next one does not."""


class LastWindows:
    """References of our own to such blocks of a prefill engine, from the prompt's last step until its push is over."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[str, list[tuple[int, int, Any]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, dropped: DroppedBlocks, tables: Sequence[Sequence[int]]) -> None:
        """Hold the blocks of a prompt that the coming step completes. ``tables``: its block ids in each group."""
        self.release(request_id)
        held = [
            (group, index, self._pool.blocks[table[index]])
            for group, (indices, table) in enumerate(zip(dropped, tables, strict=True))
            for index in indices
            if table[index] != NULL_BLOCK
        ]
        if held:
            self._pool.touch([block for _, _, block in held])
            self._held[request_id] = held

    def restored(self, request_id: str, tables: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        """The request's block ids in each group, with the held blocks where vLLM has dropped them."""
        restored = tuple(list(table) for table in tables)
        for group, index, block in self._held.get(request_id, ()):
            if index < len(restored[group]):
                restored[group][index] = block.block_id
        return restored

    def release(self, request_id: str) -> None:
        """The push is over, or there is none."""
        if (held := self._held.pop(request_id, None)) is not None:
            self._pool.free_blocks([block for _, _, block in reversed(held)])
