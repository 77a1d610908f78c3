"""Guards of packing that can be removed."""

from __future__ import annotations

from typing import Any

from layerpush.decode.loads import Loads
from layerpush.prefill.push import Push
from layerpush.prefill.push_protocol import State
from layerpush.transport.base import WriteState
from layerpush.transport.packing.memory import Copies
from layerpush.transport.packing.packer import Packer, Stage, StagedWrite
from layerpush.transport.packing.unpacker import Unpacker, UnpackReply
from layerpush.transport.packing.windows import Windows
from tests.unit.both_sides.mutants import MUTANTS, Patch, mutant

__all__ = ["MUTANTS"]

SLOW = {"plan": "packed", "slow": 0.9, "broken": 0.0, "windows": 8, "window_pieces": 1, "pieces": 6}
BROKEN = {"plan": "packed", "broken": 0.3}
ENDLESS = {**SLOW, "slow": 0.5, "looks": 80}


# The prefill side.


@mutant(packing=SLOW)
def a_packed_write_has_landed_before_it_is_unpacked(patch: Patch) -> None:
    poll = StagedWrite.poll

    def mutated(self: StagedWrite) -> WriteState:
        state = poll(self)
        return WriteState.LANDED if self.stage is Stage.UNPACKING else state

    patch.setattr(StagedWrite, "poll", mutated)


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


@mutant(packing=SLOW)
def a_span_of_the_window_is_free_before_it_is_unpacked(patch: Patch) -> None:
    wrote, release = StagedWrite._wrote, StagedWrite.release

    def mutated(self: StagedWrite) -> None:
        wrote(self)
        if self.window is not None and self.theirs is not None:
            self.window.spans.give(self.theirs)

    def released(self: StagedWrite) -> None:
        if self.stage in (Stage.UNPACKING, Stage.OVER):
            self.theirs = None
        release(self)

    patch.setattr(StagedWrite, "_wrote", mutated)
    patch.setattr(StagedWrite, "release", released)


@mutant(packing=SLOW)
def a_new_epoch_does_not_wait_for_what_is_unpacked(patch: Patch) -> None:
    poll = Push.poll

    def mutated(self: Push) -> None:
        for transfer in self.transfers if self.session.state is State.REWINDING else ():
            if isinstance(transfer, StagedWrite) and transfer.stage is Stage.UNPACKING:
                transfer.stage = Stage.OVER
        poll(self)

    patch.setattr(Push, "poll", mutated)


@mutant(packing=BROKEN)
def a_refusal_is_taken_for_done(patch: Patch) -> None:
    unpacked = Packer.unpacked

    def mutated(self: Packer, agent: str, number: int, done: bool) -> None:
        unpacked(self, agent, number, True)

    patch.setattr(Packer, "unpacked", mutated)


@mutant(packing=BROKEN)
def a_copy_that_failed_is_taken_for_done(patch: Patch) -> None:
    patch.setattr(Copies, "_fail", lambda self, error: None)


@mutant(packing=SLOW, drop=0.2)
def a_question_is_asked_once_only(patch: Patch) -> None:
    patch.setattr("layerpush.transport.packing.packer.UNPACK_RETRY_S", 1e9)


# The decode side.


@mutant(packing=ENDLESS)
def a_window_is_given_to_others_while_it_is_read_from(patch: Patch) -> None:
    def close(self: Windows, request_id: str) -> None:
        window = self._windows.pop(request_id, None)
        if window is not None:
            self._ring.give(window.offset)

    patch.setattr(Windows, "close", close)
    patch.setattr(Windows, "read_ended", lambda self, request_id: None)


@mutant(packing=SLOW, hold_writes=0.8)
def a_window_is_given_to_others_while_it_may_be_written_to(patch: Patch) -> None:
    abort = Loads.abort

    def mutated(self: Loads, request_id: str, reason: str, now: float) -> None:
        abort(self, request_id, reason, now)
        self._unpacking.close(request_id)

    patch.setattr(Loads, "abort", mutated)


@mutant(packing=SLOW)
def a_window_is_never_closed(patch: Patch) -> None:
    patch.setattr(Unpacker, "close", lambda self, request_id: None)


@mutant(packing=ENDLESS)
def an_outcome_does_not_wait_for_what_is_scattered(patch: Patch) -> None:
    patch.setattr(Unpacker, "is_unpacking", lambda self, request_id: False)


@mutant(packing=SLOW)
def anything_may_be_scattered_from_anywhere(patch: Patch) -> None:
    patch.setattr(Windows, "holds", lambda self, request_id, offset, size: request_id in self._windows)


@mutant(packing=SLOW, duplicate=0.5, delay=0.5)
def a_number_is_scattered_again_when_it_was(patch: Patch) -> None:
    answer = Unpacker._answer

    def mutated(self: Unpacker, *args: Any, **details: Any) -> UnpackReply:
        answered = answer(self, *args, **details)
        self._answered.clear()
        return answered

    patch.setattr(Unpacker, "_answer", mutated)


@mutant(packing=SLOW, duplicate=0.5)
def a_number_is_scattered_again_while_it_is(patch: Patch) -> None:
    patch.setattr(Unpacker, "_is_running", lambda self, agent, number: False)
