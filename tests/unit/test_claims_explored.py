"""All courses of one claim: each order of events, each state of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from layerpush.core.machine import IllegalTransitionError
from layerpush.core.wire import Unregistered
from layerpush.prefill import claim_protocol as protocol
from layerpush.prefill.claim_protocol import IGNORED, TRANSITIONS, Event, State
from layerpush.prefill.claim_session import Claim
from tests.unit.claim_world import AGENTS, FIRST, OTHER, SENT, ClaimWorld
from tests.unit.exploration import Triple, explore

Move = Callable[[ClaimWorld], None]

WORLDS = {"layerpush": ClaimWorld(), "stock": ClaimWorld(stock=True)}
"""P is not connected to D."""


def moves(world: ClaimWorld) -> Iterator[Move]:
    """The possible next moves."""
    yield from registrations(world)
    if not world.here and not world.begun:
        yield ClaimWorld.come
    if not world.begun and not world.busy:
        yield ClaimWorld.begin
    if world.state is State.UNCONNECTED:
        yield ClaimWorld.connect
    if world.here and not world.busy:
        yield ClaimWorld.lose_request
    if world.state is State.IDLE and not world.received:
        yield ClaimWorld.reject
    if world.claim.waits:
        yield ClaimWorld.refuse
        yield ClaimWorld.drop
        if not world.stock:
            yield ClaimWorld.time_out
    if world.state is State.UNWANTED:
        yield ClaimWorld.drop
    if not world.stock:
        yield ClaimWorld.cancel
        for attempt in range(1 + world.tries_again):
            yield lambda w, attempt=attempt: w.take_back(attempt)
        for ended in (True, False):
            yield lambda w, ended=ended: w.decline(ended=ended)
    if world.push in ("writes", "stops"):
        yield lambda w: w.fail(drained=True)
        if not world.undrained:
            yield lambda w: w.fail(drained=False)
        if world.stock:
            yield lambda w: w.fail(drained=True, reason="aborted")
    if world.push == "writes":
        yield ClaimWorld.complete
    if world.push == "drained":
        yield ClaimWorld.close


def registrations(world: ClaimWorld) -> Iterator[Move]:
    """D's newest, its next, and late copies of earlier ones, but none of a process that is dead. P does not remember
    that it has refused a second registration of an id that is in use: no copy of it may come.
    """
    other = any(number == SENT.index(OTHER) for number, _ in world.received)
    refused = world.registration(1) in world.over and world.counts != world.registration(1)
    may_come = (not other, (other or world.sent <= 1) and not refused, world.tries_again)
    for number in range(min(world.sent + 2, len(SENT) - world.stock)):
        if may_come[number]:
            yield lambda w, number=number: w.register(number, AGENTS[0])
            if (number, AGENTS[0]) in world.received:
                yield lambda w, number=number: w.register(number, AGENTS[1])


def likeness(world: ClaimWorld) -> tuple[object, ...]:
    """Equal for worlds with the same future."""
    claim = {**vars(world.claim), "now": 0.0}
    outer = {**vars(world), "claim": None, "cancelled": 0, "received": frozenset(world.received)}
    return *claim.values(), *{**outer, "over": frozenset(world.over)}.values()


def forked(world: ClaimWorld) -> ClaimWorld:
    return dataclasses.replace(world, claim=copy(world.claim), over=[*world.over], received={*world.received})


def walk(name: str) -> tuple[set[Triple], list[ClaimWorld]]:
    """The transitions of a claim, and every reachable world."""
    return explore(WORLDS[name], moves, forked, likeness, lambda world: world.claim)


explored = cache(walk)


@pytest.fixture(scope="module", autouse=True)
def _forget_worlds() -> Iterator[None]:
    """Else each later garbage collection of this process would look at all of them."""
    yield
    explored.cache_clear()


@pytest.mark.timeout(300)  # each world takes ten seconds, and more beside other work
@pytest.mark.parametrize("name", WORLDS)
def test_every_order_of_events_keeps_the_rules(name: str) -> None:
    _, worlds = explored(name)
    reached = {world.state for world in worlds}
    assert reached == set(State) - ({State.ANSWERED, State.UNWANTED, State.WITHDRAWN} if name == "stock" else set())


def is_answered_on_cancel(world: ClaimWorld) -> None:
    after = forked(world)
    before = after.cancelled
    after.cancel()
    if after.push == "stops":
        after.fail(drained=True)
        assert after.claim.answer == after.last, "9: each cancel is answered"
    else:
        assert after.cancelled > before, "9: each cancel is answered"
    assert not after.claim.waits, "9: each cancel ends the wait"


def test_d_gets_its_blocks_back_from_every_state() -> None:
    """9: each cancel is answered, if need be when the push has stopped."""
    for world in explored("layerpush")[1]:
        is_answered_on_cancel(world)


def test_the_tables_hold_exactly_reachable_transitions() -> None:
    table = {(at, event, to) for at, row in TRANSITIONS.items() for event, after in row.items() for to in after}
    ignored = {(at, event, at) for at, events in IGNORED.items() for event in events}
    assert not table & ignored
    taken = set().union(*(transitions for transitions, _ in map(explored, WORLDS)))
    assert taken - (table | ignored) == set()
    assert (table | ignored) - taken == set()


def test_every_event_has_a_handler_and_every_state_a_row() -> None:
    events = {kind for kind in vars(protocol).values() if isinstance(kind, type) and issubclass(kind, Event)}
    assert set(Claim.HANDLERS) == events - {Event}
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize("state", State)
def test_an_illegal_event_is_refused_and_changes_nothing(state: State) -> None:
    worlds = [world for name in WORLDS for world in explored(name)[1] if world.state is state]
    for world in worlds[:: 1 + len(worlds) // 50]:
        before = likeness(world)
        for event in (protocol.Matched(), protocol.Refused("no"), protocol.TimedOut("no"), protocol.RequestArrived()):
            if not world.claim.accepts(type(event)):
                with pytest.raises(IllegalTransitionError, match=f"{type(event).__name__} while {state.name}"):
                    world.claim.handle(event, 0.0)
                assert likeness(world) == before
    assert FIRST.key == worlds[0].claim.key


# Removed guards: each breaks a rule in some order of events.

MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def mutant(remove: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    MUTANTS[remove.__name__.replace("_", " ")] = remove
    return remove


def replaced(
    patch: pytest.MonkeyPatch, event: type[Event], change: Callable[[Any, Claim, Any, list[Any]], State]
) -> None:
    """``change`` gets the handler, and its arguments."""
    handler = Claim.HANDLERS[event]
    patch.setitem(Claim.HANDLERS, event, lambda claim, happened, actions: change(handler, claim, happened, actions))


@mutant
def an_equal_attempt_opens_a_claim_that_was_taken_back(patch: pytest.MonkeyPatch) -> None:
    def change(handler: Any, claim: Claim, event: Any, actions: list[Any]) -> State:
        if isinstance(claim.answer, Unregistered):
            claim.answer = replace(claim.answer, attempt=claim.answer.attempt - 1)
        return State(handler(claim, event, actions))

    replaced(patch, protocol.Registered, change)


@mutant
def a_claim_is_not_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """Its row is left out: D gets `Unregistered`, and the claim waits on."""

    def change(handler: Any, claim: Claim, event: Any, actions: list[Any]) -> State:
        registration, state = claim.registration, claim.state
        after = State(handler(claim, event, actions))
        if after is not State.WITHDRAWN:
            return after
        claim.registration, claim.answer = registration, None
        return state

    replaced(patch, protocol.Withdrawn, change)


@mutant
def another_registration_replaces_one_that_is_pushed(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, protocol.Registered, lambda on, claim, event, actions: on(claim, _idle(event), actions))


@mutant
def a_cancel_does_not_wait_for_the_push(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, protocol.CancelledByD, lambda on, claim, event, actions: on(claim, _idle(event), actions))


def _idle(event: Any) -> Any:
    return dataclasses.replace(event, busy=False)


@mutant
def a_cancel_is_not_answered(patch: pytest.MonkeyPatch) -> None:
    def change(handler: Any, claim: Claim, event: Any, actions: list[Any]) -> State:
        state = State(handler(claim, event, actions))
        actions[:] = [action for action in actions if not isinstance(action, protocol.Reply)]
        return state

    replaced(patch, protocol.CancelledByD, change)
    replaced(patch, protocol.Stopped, change)


@mutant
def the_last_answer_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A copy is accepted."""

    def change(handler: Any, claim: Claim, event: Any, actions: list[Any]) -> State:
        if claim.is_equal(event.registration):
            claim.answer = None
        return State(handler(claim, event, actions))

    replaced(patch, protocol.Registered, change)


@mutant
def a_failure_that_is_not_drained_is_the_last_word(patch: pytest.MonkeyPatch) -> None:
    def change(handler: Any, claim: Claim, event: Any, actions: list[Any]) -> State:
        state = State(handler(claim, event, actions))
        claim.answer = actions[-1].answer if actions else None
        return state

    replaced(patch, protocol.PushFailed, change)


@mutant
def a_stock_d_is_answered(patch: pytest.MonkeyPatch) -> None:
    def tell(self: Claim, registration: Any, answer: Any, actions: list[Any]) -> None:
        actions.append(protocol.Tell(registration, answer))

    patch.setattr(Claim, "_tell", tell)


@mutant
def any_agent_counts_for_the_registration(patch: pytest.MonkeyPatch) -> None:
    """Agents of the earlier registration stay."""
    keep = Claim._keep_registration
    patch.setattr(Claim, "_keep_registration", lambda self, event, senders=None: keep(self, event, self.senders))


@mutant
def blocks_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Claim, "_strip", lambda self: None)


def explore_all() -> None:
    walk("stock")
    for world in walk("layerpush")[1]:
        is_answered_on_cancel(world)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_removed_guard_breaks_a_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError, match=r"\d: "):  # not an ``IllegalTransitionError``
        explore_all()
