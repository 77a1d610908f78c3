"""Guards of the comparison of what has landed with P's KV."""

from __future__ import annotations

from dataclasses import replace

from layerpush.decode import checks, load_protocol
from layerpush.decode.checks import Checks
from layerpush.decode.load_protocol import Action
from layerpush.decode.load_session import LoadSession
from layerpush.prefill.samples import Sample
from tests.unit.both_sides.mutants import Mutant, Patch, adding_to

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


@mutant(seed=4)
def a_difference_does_not_matter(patch: Patch) -> None:
    difference = Checks.difference

    def mutated(*args: object) -> None:
        difference(*args)  # type: ignore[arg-type]

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
