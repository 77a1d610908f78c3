"""Guards of loads that give way. Without one of them, a WRITE meets blocks that D has given to another request."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from layerpush.core import load_protocol
from layerpush.core.load_session import LoadSession
from layerpush.core.wire import Registration, Unregistered
from layerpush.decode.load import Load
from layerpush.prefill.registrations import Registrations
from tests.unit.both_sides.mutants import Mutant, Patch

MUTANTS: list[Mutant] = []


def _add(remove: Any) -> Any:
    MUTANTS.append(Mutant(remove.__name__.replace("_", " "), remove, {}))
    return remove


@_add
def an_answer_to_an_earlier_attempt_counts(patch: Patch) -> None:
    plain = Load.on_message

    def on_message(self: Load, sender: str, message: Any, payload: bytes, now: float) -> None:
        if isinstance(message, Unregistered):
            message = replace(message, attempt=self.registration.attempt)
        plain(self, sender, message, payload, now)

    patch.setattr(Load, "on_message", on_message)


@_add
def p_serves_a_registration_after_it_was_taken_back(patch: Patch) -> None:
    plain = Registrations.on_registration

    def on_registration(self: Registrations, sender: str, registration: Registration, now: float) -> None:
        if isinstance(self._answers.get(registration.key), Unregistered):
            del self._answers[registration.key]
        plain(self, sender, registration, now)

    patch.setattr(Registrations, "on_registration", on_registration)


@_add
def one_rank_speaks_for_all(patch: Patch) -> None:
    plain = LoadSession._on_unregistered

    def on_unregistered(self: LoadSession, event: load_protocol.Unregistered, now: float, actions: Any) -> Any:
        for agent in sorted(self.open_agents) if self.state is load_protocol.State.UNREGISTERING else []:
            state = plain(self, load_protocol.Unregistered(agent), now, actions)
        return plain(self, event, now, actions) if self.open_agents else state

    patch.setitem(LoadSession.HANDLERS, load_protocol.Unregistered, on_unregistered)  # type: ignore[arg-type]
