"""Guards that can be removed, to show that they are needed and that the checks would notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from layerpush.core.first_token import Sampled
from layerpush.core.liveness import PeerWatch
from layerpush.core.wire import Cancel, Cancelled, encode
from layerpush.decode import load_protocol as awaited
from layerpush.decode.load_protocol import Action
from layerpush.decode.load_session import LoadSession
from layerpush.decode.outcomes import Outcomes
from layerpush.engine.scheduler import turn_protocol as turns
from layerpush.engine.scheduler.turns import Turn, Turns
from layerpush.prefill import claim_protocol as claims
from layerpush.prefill import push_protocol as pushed
from layerpush.prefill.claim_session import Claim
from layerpush.prefill.claims import Claims
from layerpush.prefill.coverage import Coverage
from layerpush.prefill.pairing import Pairing
from layerpush.prefill.push import Push
from layerpush.prefill.push_session import PushSession
from layerpush.prefill.pushes import Pushes
from layerpush.prefill.step_events import StepEvents
from layerpush.transport.connections import TRIES, Connections, Then
from layerpush.transport.peers import Address

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """``fault_rates`` with which the guard matters most. Storms from ``seed`` on find it first; another seed may be
    better after a change of the product.
    """

    name: str
    remove: Callable[[Patch], None]
    fault_rates: dict[str, Any]
    seed: int = 0

    def seeds(self, count: int) -> list[int]:
        """All ``count`` seeds, from ``seed`` on."""
        return [*range(self.seed, count), *range(self.seed)]


def adding_to(mutants: list[Mutant]) -> Callable[..., Callable[[Callable[[Patch], None]], Callable[[Patch], None]]]:
    """A decorator of what removes a guard. It takes a mutant's ``seed`` and ``fault_rates``. D has one rank unless they
    name another number in ``decode_ranks``.
    """

    def mutant(seed: int = 0, **fault_rates: Any) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
        def add(remove: Callable[[Patch], None]) -> Callable[[Patch], None]:
            name, rates = remove.__name__.replace("_", " "), {"decode_ranks": 1} | fault_rates
            mutants.append(Mutant(name, remove, rates, seed))
            return remove

        return add

    return mutant


MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


# The decode side.


LEAVING = (awaited.State.WAITING, awaited.State.CANCELLING, awaited.State.ABORTING)


def _leaving(patch: Patch, when: Callable[[LoadSession, awaited.Event], bool]) -> None:
    """Some events end a load although agents may still write."""
    handle = LoadSession.handle

    def mutated(self: LoadSession, event: awaited.Event, now: float) -> list[Action]:
        if self.state in LEAVING and when(self, event):
            self.state = awaited.State.CLOSED
            return [awaited.ReportFailed("mutant")]
        return handle(self, event, now)

    patch.setattr(LoadSession, "handle", mutated)


@mutant()
def an_overdue_load_is_given_up_at_once(patch: Patch) -> None:
    _leaving(patch, lambda _, event: isinstance(event, awaited.TimedOut))


@mutant()
def an_aborted_load_is_given_up_at_once(patch: Patch) -> None:
    _leaving(patch, lambda _, event: isinstance(event, awaited.Aborted))


@mutant()
def a_silent_agent_is_taken_for_dead(patch: Patch) -> None:
    _leaving(patch, lambda _, event: isinstance(event, awaited.AgentSilent))


@mutant(seed=27)
def a_failure_is_taken_for_drained(patch: Patch) -> None:
    _leaving(patch, lambda _, event: isinstance(event, awaited.AgentFailed))


@mutant()
def the_final_status_of_one_agent_is_enough(patch: Patch) -> None:
    patch.setattr(LoadSession, "_is_over", property(lambda self: bool(self.statuses)))


@mutant()
def one_completion_is_enough(patch: Patch) -> None:
    patch.setattr(LoadSession, "_complete", property(lambda self: self.landed > 0))


@mutant(seed=27, hold_writes=0.8)
def patience_frees_the_blocks(patch: Patch) -> None:
    """The blocks are given back instead of parked."""
    patch.setattr("tests.unit.both_sides.decode.DecodeEngine._park", lambda self, rank, news: None)
    patch.setattr("tests.unit.both_sides.decode.DecodeEngine._clear", lambda self, rank, news: None)


@mutant(drop=0.2)
def a_cancel_is_sent_once_only(patch: Patch) -> None:
    init = LoadSession.__init__

    def mutated(self: LoadSession, *args: Any) -> None:
        init(self, *args)
        self._retry_s = 1e9

    patch.setattr(LoadSession, "__init__", mutated)


@mutant(drop=0.2)
def a_lost_token_is_awaited_for_ever(patch: Patch) -> None:
    patch.setattr("layerpush.decode.load_session.TOKEN_WAIT_S", 1e9)


@mutant()
def a_token_comes_with_a_load_that_has_not_asked(patch: Patch) -> None:
    """A complete load without a token is reported with "late", even if it did not ask."""
    report_ended = Outcomes.report_ended

    def mutated(self: Outcomes, record: Any, outcome: Any, reason: Any, now: float, *rest: Any, kept: int = 0) -> None:
        completions, token = [*rest, (), None][:2] if len(rest) < 2 else rest
        token = "late" if completions and token is None else token
        report_ended(self, record, outcome, reason, now, completions, token, kept)

    patch.setattr(Outcomes, "report_ended", mutated)


@mutant()
def a_refused_probe_proves_a_death(patch: Patch) -> None:
    verdict = PeerWatch.probe_ended

    def mutated(self: PeerWatch, engine_id: str, name: str, *args: Any) -> None:
        self.send_failed(name, args[-1])
        verdict(self, engine_id, name, *args)

    patch.setattr(PeerWatch, "probe_ended", mutated)


@mutant()
def silence_is_never_noticed(patch: Patch) -> None:
    """Death is not noticed either."""
    patch.setattr(PeerWatch, "due", lambda self, now: [])


# The prefill side.


@mutant(fail_writes=0.3, hold_writes=0.8)
def a_push_is_called_drained_when_it_fails(patch: Patch) -> None:
    report = PushSession._report

    def mutated(self: PushSession, reason: str, actions: list[pushed.Action], *, drained: bool) -> None:
        report(self, reason, actions, drained=True)

    patch.setattr(PushSession, "_report", mutated)


@mutant()
def a_cancel_is_answered_before_the_wire_is_empty(patch: Patch) -> None:
    on_cancel = Claims.on_cancel

    def mutated(self: Claims, sender: str, message: Cancel, now: float) -> None:
        on_cancel(self, sender, message, now)
        self._connections.notify(sender, encode(Cancelled(message.request_id)))

    patch.setattr(Claims, "on_cancel", mutated)


@mutant()
def a_cancel_does_not_wait_for_the_push(patch: Patch) -> None:
    plain = Claim._on_cancelled

    def mutated(self: Claim, event: claims.CancelledByD, actions: list[Any]) -> claims.State:
        return plain(self, replace(event, busy=False), actions)

    patch.setitem(Claim.HANDLERS, claims.CancelledByD, mutated)


@mutant(seed=103)
def a_cancel_is_forgotten_once_answered(patch: Patch) -> None:
    """A registration after the cancel is served."""
    end = Claim._end

    def mutated(self: Claim, message: Cancel, actions: list[Any], *, connect: bool) -> None:
        end(self, message, actions, connect=connect)
        self.answer = self.registration = None

    patch.setattr(Claim, "_end", mutated)


@mutant()
def a_token_of_any_sampling_will_do(patch: Patch) -> None:
    patch.setattr(Sampled, "for_request", lambda self, sampling: self.token)


@mutant()
def a_restarted_engine_is_taken_for_the_old_one(patch: Patch) -> None:
    patch.setattr(Claims, "refusal", lambda self, named: self._connections.closing(named.decode_engine_id))


@mutant()
def prompts_are_told_apart_by_their_id_alone(patch: Patch) -> None:
    patch.setattr(Pairing, "prompts_differ", lambda self, named, prompt: False)


@mutant(turns=True)
def a_kept_turn_is_pushed_to_its_end(patch: Patch) -> None:
    patch.setattr(Push, "_keep_first", lambda self, tokens: None)


@mutant(turns=True)
def a_kept_turn_is_any_of_its_name(patch: Patch) -> None:
    plain = Pairing.prompts_differ

    def mutated(self: Pairing, named: Any, prompt: Any) -> bool:
        return prompt.prefixes is None and plain(self, named, prompt)

    patch.setattr(Pairing, "prompts_differ", mutated)


@mutant(turns=True, hold_writes=0.8)
def a_kept_turn_ends_with_its_first_rank(patch: Patch) -> None:
    plain = Turns.keep

    def mutated(self: Turns, request_id: str, blocks: Any) -> None:
        self._ranks = 1
        plain(self, request_id, blocks)

    patch.setattr(Turns, "keep", mutated)


@mutant(turns=True, hold_writes=0.8)
def a_turn_that_gives_way_is_free_at_once(patch: Patch) -> None:
    def mutated(self: Turn, event: turns.Released, actions: list[turns.Action]) -> turns.State:
        actions.append(turns.Free())
        return plain(self, event, actions)

    plain = Turn._on_released
    patch.setitem(Turn.HANDLERS, turns.Released, mutated)


@mutant(seed=75, hold_writes=0.8)
def a_preempted_push_forgets_its_writes(patch: Patch) -> None:
    """The old epoch's WRITEs are still on the wire when the new one begins."""
    restart, handle = PushSession._restart, PushSession.handle

    def mutated(self: PushSession, epoch: int) -> pushed.State:
        state = restart(self, epoch)
        if state is not pushed.State.REWINDING:
            return state
        self.in_flight.clear()
        return pushed.State.STREAMING

    def forgetful(self: PushSession, event: pushed.Event, now: float) -> list[pushed.Action]:
        forgotten = isinstance(event, pushed.WriteLanded | pushed.WriteLost) and event.write not in self.in_flight
        return [] if forgotten else handle(self, event, now)

    patch.setattr(PushSession, "_restart", mutated)
    patch.setattr(PushSession, "handle", forgetful)


@mutant()
def a_push_is_complete_before_its_last_write_has_landed(patch: Patch) -> None:
    settle = PushSession._settle

    def mutated(self: PushSession, actions: list[pushed.Action]) -> pushed.State:
        in_flight, self.in_flight = self.in_flight, {}
        try:
            return settle(self, actions)
        finally:
            self.in_flight = in_flight

    patch.setattr(PushSession, "_settle", mutated)
    patch.setattr(Coverage, "full", property(lambda self: True))


@mutant()
def steps_of_a_revoked_request_still_count(patch: Patch) -> None:
    def dropped(self: StepEvents) -> Iterator[Any]:
        self._revoked.clear()
        return iter(())

    patch.setattr(StepEvents, "is_void", lambda self, request_id, step: False)
    patch.setattr(StepEvents, "take_revoked", dropped)


@mutant(seed=50)
def a_completion_does_not_wait_for_the_scheduler(patch: Patch) -> None:
    """Another connector's lost block is found out after the step."""
    settle = PushSession._settle

    def mutated(self: PushSession, actions: list[pushed.Action]) -> pushed.State:
        self._provisional = False
        return settle(self, actions)

    patch.setattr(PushSession, "_settle", mutated)


@mutant(fail_writes=0.3)
def a_lost_write_counts_as_landed(patch: Patch) -> None:
    handle = PushSession.handle

    def mutated(self: PushSession, event: pushed.Event, now: float) -> list[pushed.Action]:
        return handle(self, pushed.WriteLanded(event.write) if isinstance(event, pushed.WriteLost) else event, now)

    patch.setattr(PushSession, "handle", mutated)


@mutant(seed=58, hold_writes=0.8)
def a_request_says_where_a_connected_engine_is(patch: Patch) -> None:
    """vLLM connected the engine for a heartbeat; a request's address replaces the handshake's."""
    reach, forget = Connections.reach, Connections.forget
    asked: dict[tuple[Connections, str], Address] = {}

    def trusting(self: Connections, address: Address, then: Then, now: float, tries: int = TRIES) -> None:
        if self.agents(address.engine_id):
            asked.setdefault((self, address.engine_id), address)
        reach(self, address, then, now, tries)

    def forgetting(self: Connections, engine_id: str) -> bool:
        asked.pop((self, engine_id), None)
        return forget(self, engine_id)

    patch.setattr(Connections, "reach", trusting)
    patch.setattr(Connections, "forget", forgetting)
    patch.setattr(Connections, "address", lambda self, engine_id: asked.get((self, engine_id)))


@mutant(seed=75, hold_writes=1.0, most=120)
def a_lease_ends_under_writes(patch: Patch) -> None:
    patch.setattr(Pushes, "writes_in_flight", lambda self, request_id: False)
