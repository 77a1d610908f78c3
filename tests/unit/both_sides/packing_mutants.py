"""Guards of packing that can be removed."""

from __future__ import annotations

from layerpush.transport.base import WriteState
from layerpush.transport.gather.gatherer import Stage, StagedWrite
from layerpush.transport.gather.memory import Copies
from tests.unit.both_sides.mutants import MUTANTS, Patch, mutant

__all__ = ["MUTANTS"]


@mutant(packing={"plan": "mixed", "slow": 0.9})
def what_is_not_gathered_yet_is_written(patch: Patch) -> None:
    poll = StagedWrite.poll

    def mutated(self: StagedWrite) -> WriteState:
        if self.stage is Stage.GATHERING:
            self.copies = Copies()
        return poll(self)

    patch.setattr(StagedWrite, "poll", mutated)


@mutant(packing={"plan": "mixed"}, hold_writes=0.8)
def our_span_is_free_while_a_write_reads_from_it(patch: Patch) -> None:
    poll = StagedWrite.poll

    def mutated(self: StagedWrite) -> WriteState:
        state = poll(self)
        if self.stage is Stage.WRITING:
            self._free()
        return state

    patch.setattr(StagedWrite, "poll", mutated)


@mutant(packing={"plan": "mixed"})
def our_span_is_never_free(patch: Patch) -> None:
    patch.setattr(StagedWrite, "_free", lambda self: None)


@mutant(packing={"plan": "gather", "broken": 0.3})
def a_copy_that_failed_is_taken_for_done(patch: Patch) -> None:
    patch.setattr(Copies, "_fail", lambda self, error: None)
