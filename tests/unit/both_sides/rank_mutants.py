"""Guards of a decode engine of several ranks. No storm with one rank needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerpush.core.load_news import LoadCleared, LoadNews, LoadParked, LoadUnregistered
from layerpush.decode import load_protocol
from layerpush.decode.load_protocol import State
from layerpush.decode.load_session import LoadSession
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.engine.scheduler.block_holds import BlockHolds
from tests.unit.both_sides.decode import DecodeEngine
from tests.unit.both_sides.mutants import Mutant, Patch, adding_to

MUTANTS: list[Mutant] = []
"""Storms reveal them."""
FULL_MUTANTS: list[Mutant] = []
"""Full caches reveal them."""
mutant, full_mutant = adding_to(MUTANTS), adding_to(FULL_MUTANTS)


@full_mutant(seed=3, decode_ranks=2)
def a_rank_that_connects_does_not_hear_that_its_load_gives_way(patch: Patch) -> None:
    plain = LoadSession._on_gave_way

    def mutated(self: LoadSession, event: load_protocol.GaveWay, actions: Any) -> State:
        return self.state if self.state is State.REGISTERING else plain(self, event, actions)

    patch.setitem(LoadSession.HANDLERS, load_protocol.GaveWay, mutated)
    row: Any = load_protocol.TRANSITIONS[State.REGISTERING]
    patch.setitem(row, load_protocol.GaveWay, {State.REGISTERING})


def _all_as_rank_0(patch: Patch, kind: Any) -> None:
    reported = DecodeEngine.reported

    def mutated(self: DecodeEngine, rank: int, news: LoadNews) -> None:
        reported(self, rank, replace(news, rank=0) if isinstance(news, kind) else news)

    patch.setattr(DecodeEngine, "reported", mutated)


@mutant(seed=50, decode_ranks=2)
def every_rank_parks_as_rank_0(patch: Patch) -> None:
    _all_as_rank_0(patch, LoadParked)


@mutant(seed=50, decode_ranks=2)
def every_rank_clears_as_rank_0(patch: Patch) -> None:
    _all_as_rank_0(patch, LoadCleared)


@full_mutant(decode_ranks=2)
def every_rank_unregisters_as_rank_0(patch: Patch) -> None:
    _all_as_rank_0(patch, LoadUnregistered)


@mutant(seed=17, turns=True, decode_ranks=2)
def a_rank_that_still_connects_gives_its_blocks_back(patch: Patch) -> None:
    """Another rank has registered, and P writes to both."""
    patch.setattr(LoadSession, "_may_be_written", property(lambda self: bool(self.open_agents)))


@mutant(seed=0, decode_ranks=2)
def a_rank_does_not_register_again_before_it_cancels(patch: Patch) -> None:
    """P knows the load from the other rank, and takes the cancel for a stranger's."""
    patch.setattr(PrefillPeers, "register_again", lambda *_: None)


@mutant(seed=125, decode_ranks=2)
def the_first_rank_that_clears_frees_the_blocks(patch: Patch) -> None:
    def mutated(self: BlockHolds, request_id: str, _: int) -> None:
        if request_id in self._held:
            self._held[request_id].parked.clear()
            self._release(request_id)

    patch.setattr(BlockHolds, "clear", mutated)
