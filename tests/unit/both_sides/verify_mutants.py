"""Guards of the comparison of what has landed with P's KV, and WRITEs that only this comparison may see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from layerpush.core.write import Write
from layerpush.decode import checks, load_protocol
from layerpush.decode.checks import Checks
from layerpush.decode.load_protocol import Action
from layerpush.decode.load_session import LoadSession
from layerpush.prefill.samples import Sample
from layerpush.transport.base import DescriptorIds
from layerpush.transport.link import DirectPlanner, Link
from tests.unit.both_sides import mutants
from tests.unit.both_sides.mutants import Mutant, Patch, adding_to

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


@mutant(seed=4)
def a_difference_does_not_matter(patch: Patch) -> None:
    difference = Checks.difference

    def mutated(*args: object) -> None:
        difference(*args)

    patch.setattr(Checks, "difference", mutated)


@mutant(seed=4)
def only_the_first_layer_is_compared(patch: Patch) -> None:
    sums = Sample.sums
    patch.setattr(Sample, "sums", lambda self, rank: sums(self, rank)[:1])


@mutant(seed=45)
def a_new_epoch_forgets_the_checksums_of_what_is_kept(patch: Patch) -> None:
    patch.setattr(Sample, "_drop_after", lambda self, tokens: self._taken.clear())


@mutant(seed=4)
def a_prefix_of_wrong_kv_is_kept(patch: Patch) -> None:
    failed = LoadSession.HANDLERS[load_protocol.AgentFailed]

    def mutated(self: LoadSession, event: load_protocol.AgentFailed, actions: list[Action]) -> load_protocol.State:
        return failed(self, replace(event, is_wrong=False), actions)

    patch.setitem(LoadSession.HANDLERS, load_protocol.AgentFailed, mutated)


@mutant(seed=3)
def the_blocks_of_a_prompt_are_counted_from_the_first_registered_one(patch: Patch) -> None:
    """D has some of them already."""
    patch.setattr(checks, "_skipped", lambda *_: 0)


EARLY = (mutants.a_lost_write_counts_as_landed, mutants.a_push_is_complete_before_its_last_write_has_landed)
WRONG_WRITES = [each for each in mutants.MUTANTS if each.remove in EARLY]
"""D gets a completion for other bytes than P's."""


@adding_to(WRONG_WRITES)()
def blocks_change_places(patch: Patch) -> None:
    right = DirectPlanner.descriptors

    def mutated(self: DirectPlanner, write: Write, link: Link) -> tuple[DescriptorIds, DescriptorIds]:
        local, remote = right(self, write, link)
        return local, np.roll(remote, 1)

    patch.setattr(DirectPlanner, "descriptors", mutated)
