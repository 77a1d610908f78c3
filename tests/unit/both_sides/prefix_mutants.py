"""Guards of what D keeps of a failed load."""

from __future__ import annotations

from collections.abc import Iterator

from layerpush.decode.load_session import LoadSession
from layerpush.prefill.coverage import Coverage
from layerpush.prefill.push_protocol import Action
from layerpush.prefill.push_session import PushSession
from layerpush.prefill.ready_blocks import ReadyBlocks
from tests.unit.both_sides.mutants import Mutant, Patch, adding_to

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


@mutant(seed=2)
def a_preempted_push_writes_a_reported_prefix_again(patch: Patch) -> None:
    patch.setattr(ReadyBlocks, "keep", lambda self, chunk: None)


@mutant(seed=4)
def one_rank_speaks_for_a_prefix(patch: Patch) -> None:
    patch.setattr(LoadSession, "landed_tokens", property(lambda self: max(self._prefixes.values(), default=0)))


@mutant(seed=3)
def a_prefix_is_reported_before_it_has_landed(patch: Patch) -> None:
    up_to = ReadyBlocks.up_to

    def mutated(self: ReadyBlocks, chunk: int) -> tuple[int, int, list[int]]:
        tokens, _, counts = up_to(self, chunk)
        return tokens, 0, counts

    patch.setattr(ReadyBlocks, "up_to", mutated)
    patch.setattr(Coverage, "has_landed", lambda self, counts: True)


@mutant(seed=7)
def a_prefix_is_reported_though_it_may_be_taken_back(patch: Patch) -> None:
    prefix = PushSession._prefix

    def mutated(self: PushSession) -> Iterator[Action]:
        self._was_provisional = False
        yield from prefix(self)

    patch.setattr(PushSession, "_prefix", mutated)
