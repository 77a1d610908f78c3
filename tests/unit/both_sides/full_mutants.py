"""Guards of loads that give way. Without one of them, a WRITE meets blocks that D has given to another request."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from layerpush.core.wire import Unregistered
from layerpush.decode import load_protocol
from layerpush.decode.load import Load
from layerpush.decode.load_session import LoadSession
from layerpush.prefill import claim_protocol
from layerpush.prefill.claim_session import Claim
from tests.unit.both_sides.mutants import Mutant, Patch, adding_to

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


@mutant(drop=0.0, duplicate=0.5, reorder=0.5, delay=0.8)
def an_answer_to_an_earlier_attempt_counts(patch: Patch) -> None:
    plain = Load.on_message

    def on_message(self: Load, sender: str, message: Any, payload: bytes, now: float) -> None:
        if isinstance(message, Unregistered):
            message = replace(message, attempt=self.registration.attempt)
        plain(self, sender, message, payload, now)

    patch.setattr(Load, "on_message", on_message)


@mutant(seed=71, drop=0.0, duplicate=0.5, reorder=0.5, delay=0.8)
def an_equal_attempt_opens_a_claim_that_was_taken_back(patch: Patch) -> None:
    plain = Claim._on_registered

    def on_registered(self: Claim, event: claim_protocol.Registered, actions: Any) -> Any:
        if isinstance(self.answer, Unregistered):
            self.answer = replace(self.answer, attempt=event.registration.attempt - 1)
        return plain(self, event, actions)

    patch.setitem(Claim.HANDLERS, claim_protocol.Registered, on_registered)


@mutant()
def a_claim_that_was_taken_back_waits_on(patch: Patch) -> None:
    """It has no row `WITHDRAWN`."""
    plain = Claim._on_withdrawn

    def on_withdrawn(self: Claim, event: claim_protocol.Withdrawn, actions: Any) -> Any:
        registration, state = self.registration, self.state
        after = plain(self, event, actions)
        if not self.waits or after is not claim_protocol.State.WITHDRAWN:
            return after
        self.registration = self.named = registration
        self.answer = None
        return state

    patch.setitem(Claim.HANDLERS, claim_protocol.Withdrawn, on_withdrawn)


@mutant(seed=11)
def one_rank_speaks_for_all(patch: Patch) -> None:
    plain = LoadSession._on_unregistered

    def on_unregistered(self: LoadSession, event: load_protocol.AgentUnregistered, actions: Any) -> Any:
        for agent in sorted(self.open_agents) if self.state is load_protocol.State.UNREGISTERING else []:
            state = plain(self, load_protocol.AgentUnregistered(agent), actions)
        return plain(self, event, actions) if self.open_agents else state

    patch.setitem(LoadSession.HANDLERS, load_protocol.AgentUnregistered, on_unregistered)
