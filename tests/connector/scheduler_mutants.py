"""Guards of the scheduler's side that can be removed, to show that storms notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from layerpush.engine.scheduler import scheduler
from layerpush.engine.scheduler.block_holds import BlockHolds
from layerpush.engine.scheduler.postponed_loads import PostponedLoads
from layerpush.engine.scheduler.turns import Turn

Patch = pytest.MonkeyPatch

MUTANTS: list[Callable[[Patch], None]] = []


def mutant(remove: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS.append(remove)
    return remove


@mutant
def ended_requests_have_news(patch: Patch) -> None:
    patch.setattr(scheduler, "RequestNews", ())


@mutant
def parked_blocks_are_free(patch: Patch) -> None:
    patch.setattr(BlockHolds, "park", lambda *_: None)


@mutant
def the_first_rank_that_clears_frees_the_blocks(patch: Patch) -> None:
    plain = BlockHolds.clear

    def clear(self: BlockHolds, request_id: str, rank: int) -> None:
        for each in (rank, 1 - rank):
            plain(self, request_id, each)

    patch.setattr(BlockHolds, "clear", clear)


@mutant
def the_first_rank_ends_a_turn(patch: Patch) -> None:
    plain = Turn.__init__

    def init(self: Turn, request_id: str, blocks: Any = (), ranks: int = 0, register: Any = None) -> None:
        plain(self, request_id, blocks, min(ranks, 1), register)

    patch.setattr(Turn, "__init__", init)


@mutant
def requests_wait_for_each_other(patch: Patch) -> None:
    patch.setattr(PostponedLoads, "request_placed", lambda self, request_id: self._waiting.pop(request_id, None))
