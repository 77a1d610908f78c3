"""Guards of loads that give way. Without one of them, a WRITE meets blocks that D has given to another request."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from layerpush.core.wire import Unregistered
from layerpush.decode import load_protocol
from layerpush.decode.load import Load
from layerpush.decode.load_session import LoadSession
from tests.unit.both_sides.mutants import Mutant, Patch

MUTANTS: list[Mutant] = []


def _add(**weather: float) -> Any:
    def add(remove: Any) -> Any:
        MUTANTS.append(Mutant(remove.__name__.replace("_", " "), remove, weather))
        return remove

    return add


@_add(drop=0.0, duplicate=0.5, reorder=0.5, delay=0.8)
def an_answer_to_an_earlier_attempt_counts(patch: Patch) -> None:
    plain = Load.on_message

    def on_message(self: Load, sender: str, message: Any, payload: bytes, now: float) -> None:
        if isinstance(message, Unregistered):
            message = replace(message, attempt=self.registration.attempt)
        plain(self, sender, message, payload, now)

    patch.setattr(Load, "on_message", on_message)


@_add()
def one_rank_speaks_for_all(patch: Patch) -> None:
    plain = LoadSession._on_unregistered

    def on_unregistered(self: LoadSession, event: load_protocol.Unregistered, actions: Any) -> Any:
        for agent in sorted(self.open_agents) if self.state is load_protocol.State.UNREGISTERING else []:
            state = plain(self, load_protocol.Unregistered(agent), actions)
        return plain(self, event, actions) if self.open_agents else state

    patch.setitem(LoadSession.HANDLERS, load_protocol.Unregistered, on_unregistered)  # type: ignore[arg-type]
