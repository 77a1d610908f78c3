"""Guards of the comparison of what has landed with P's KV, and WRITEs that only this comparison may see."""

from __future__ import annotations

from typing import Any

import numpy as np

from layerpush.core.write import Write
from layerpush.decode import checks
from layerpush.decode.checks import Checks
from layerpush.decode.load import Load
from layerpush.decode.load_protocol import State
from layerpush.prefill.samples import Sample
from layerpush.transport.base import DescriptorIds
from layerpush.transport.link import DirectPlanner, Link
from tests.unit.both_sides import mutants
from tests.unit.both_sides.mutants import Mutant, Patch, adding_to

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


@mutant(seed=3)
def a_difference_does_not_matter(patch: Patch) -> None:
    difference = Checks.difference

    def mutated(*args: object) -> None:
        difference(*args)

    patch.setattr(Checks, "difference", mutated)


@mutant(seed=3)
def only_the_first_layer_is_compared(patch: Patch) -> None:
    sums = Sample.sums
    patch.setattr(Sample, "sums", lambda self, *part: sums(self, *part)[:1])


@mutant(seed=45)
def a_new_epoch_forgets_the_checksums_of_what_is_kept(patch: Patch) -> None:
    patch.setattr(Sample, "_drop_after", lambda self, tokens: self._taken.clear())


@mutant(seed=3)
def what_is_kept_is_not_compared(patch: Patch) -> None:
    patch.setattr(Load, "_note_prefix", lambda *_: None)


@mutant(seed=154)
def a_load_that_is_cancelled_is_not_compared(patch: Patch) -> None:
    is_right = Load._is_right

    def mutated(self: Load, *args: Any) -> bool:
        return self.session.state not in (State.WAITING, State.UNREGISTERING) or is_right(self, *args)

    patch.setattr(Load, "_is_right", mutated)


@mutant(seed=20)
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
