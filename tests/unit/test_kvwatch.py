"""Cells of block tables in the engine hosts' watch over KV blocks."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.e2e.kvwatch import KvWatch, WatchedLayer

SIZE = 4


def watch(window: int | None = None) -> KvWatch:
    cache = torch.arange(6 * SIZE * 2, dtype=torch.float32).view(6, SIZE, 2)
    return KvWatch(SimpleNamespace(schedule=lambda: None), [WatchedLayer(cache, 0, window, SIZE)], SIZE)


def present(kv_watch: KvWatch, table: list[int], only: set[int] | None) -> list[bool]:
    digest = kv_watch._digest(3 * SIZE - 1, [table], only)
    return [cell is not None for cell in digest.cells[0]]


def test_every_block_of_the_prompt_has_a_cell() -> None:
    assert present(watch(), [2, 0, 5], None) == [True, True, True]
    assert present(watch(), [2, 0, 5], {0, 5}) == [False, True, True]
    assert present(watch(window=SIZE), [2, 0, 5], None) == [False, True, True]


def test_a_partly_computed_prompt_has_no_cells_for_missing_blocks() -> None:
    assert present(watch(), [2, 0], {0, 5}) == [False, True, False]
    assert present(watch(), [], set()) == [False, False, False]
