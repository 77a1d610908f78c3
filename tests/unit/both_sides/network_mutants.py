"""Guards of an unordered network that can be removed."""

from __future__ import annotations

from layerpush.core.wire import HasLanded, Landed, Message
from layerpush.transport import acknowledged
from layerpush.transport.acknowledged import AcknowledgedTransport
from layerpush.transport.base import WriteHandle, WriteState
from tests.unit.both_sides.mutants import Patch, mutant


@mutant(ordered=False)
def a_write_has_landed_when_it_has_left(patch: Patch) -> None:
    poll = AcknowledgedTransport.poll

    def mutated(self: AcknowledgedTransport, handle: WriteHandle) -> WriteState:
        state = poll(self, handle)
        return state if self._posted[handle].ask_at is None else WriteState.LANDED

    patch.setattr(AcknowledgedTransport, "poll", mutated)


@mutant(seed=14, ordered=False, hold_writes=0.8, drop=0.2)
def a_question_is_answered_before_the_write_has_landed(patch: Patch) -> None:
    read = acknowledged._read

    def mutated(payload: bytes) -> Message | None:
        message = read(payload)
        return Landed(message.number) if isinstance(message, HasLanded) else message

    patch.setattr(acknowledged, "_read", mutated)


@mutant(ordered=False, drop=0.2)
def a_lost_answer_is_never_asked_for(patch: Patch) -> None:
    patch.setattr(acknowledged, "ASK_S", 1e9)


@mutant(seed=14, ordered=False, drop=0.2)
def a_landed_write_is_forgotten(patch: Patch) -> None:
    patch.setattr(acknowledged, "LANDED_KEPT", 0)
