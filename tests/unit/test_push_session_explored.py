"""All courses of a few small requests: each order of events, each state of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from layerpush.core.machine import IllegalTransitionError
from layerpush.core.push_mode import PushMode
from layerpush.prefill import push_protocol
from layerpush.prefill.push_protocol import IGNORED, TRANSITIONS, Event, State
from layerpush.prefill.push_session import PushSession
from tests.unit.clones import clone
from tests.unit.exploration import Triple, explore
from tests.unit.push_world import SAMPLED, PushWorld, Shape

Move = Callable[[PushWorld], None]

SHAPES = {
    "by layer": Shape(8, (0,), (4,), (2,), max_in_flight=2),
    "two layers": Shape(4, (0, 0), (4,), (1,), max_in_flight=2),
    "preempted twice": Shape(4, (0,), (4,), (1,)),
    "by chunk": Shape(8, (0, 0), (4,), (2,), PushMode.CHUNK),
    "a hit on D": Shape(8, (0, 0), (4,), (1,)),
    "nothing wanted": Shape(8, (0,), (4,), (0,)),
    "two groups": Shape(8, (0, 1), (4, 8), (2, 1), max_in_flight=1),
    "a sliding window": Shape(8, (0,), (4,), (2,), nulls=(1, 0, 0)),
    "beside another connector": Shape(8, (0,), (4,), (1,), max_in_flight=1, provisional=True),
    "beside another connector, nothing wanted": Shape(4, (0,), (4,), (0,), provisional=True),
    "beside another connector, preempted": Shape(4, (0,), (4,), (1,), provisional=True),
    "beside another connector, only watched": Shape(4, (0,), (4,), (1,), PushMode.WHOLE, provisional=True),
    "kept": Shape(8, (0,), (4,), (2,), max_in_flight=2, keeps=True),
    "kept, two layers": Shape(8, (0, 0), (4,), (2,), max_in_flight=1, keeps=True),
    "kept, beside another connector": Shape(8, (0,), (4,), (2,), max_in_flight=1, provisional=True, keeps=True),
    "only watched": Shape(8, (0, 0), (4,), (2,), PushMode.WHOLE),
    "other blocks": Shape(4, (0, 0), (4,), (1,), other_blocks=True),
    "other blocks, only watched": Shape(8, (0, 1), (4, 8), (2, 1), PushMode.WHOLE, other_blocks=True),
}

PREEMPTIONS = {
    SHAPES["by layer"]: 1,
    SHAPES["preempted twice"]: 2,
    SHAPES["kept"]: 1,
    SHAPES["beside another connector, preempted"]: 1,
}
REWINDS = 1
PRECAUTIONS: set[Triple] = {
    (State.WHOLE, push_protocol.Aborted, State.CLOSED),
    (State.WRITING_WHOLE, push_protocol.Aborted, State.DRAINING),
}
"""Transitions that no order of events causes: a finished request is not aborted. They stay, because an abort frees
blocks, and a session must not ignore that while a WRITE may read them.
"""


def moves(world: PushWorld) -> Iterator[Move]:
    """The possible next moves. Nothing reaches a closed session any more."""
    if world.state is State.CLOSED:
        return
    if world.report is not None:  # the writer does nothing else first, unless the blocks are taken away
        yield PushWorld.confirm_prefix
        if world.revocable and world.epoch - world.rewinds < PREEMPTIONS.get(world.shape, 0):
            yield lambda w: w.preempt(announced=True)
        if world.droppable:
            yield PushWorld.drop
        return
    if world.state is State.NOTIFYING:
        yield PushWorld.confirm_completion
        yield PushWorld.fail
    if world.running and not world.unready and world.computed < world.shape.tokens:
        yield lambda w: w.plan(4)
    if world.running:
        for layer in sorted(world.unready):
            yield lambda w, layer=layer: w.hook(layer)
        if world.chunks and 0 not in world.unready:
            yield lambda w: w.hook(0)
        if world.chunks and world.epoch:
            yield lambda w: w.stale_hook(0)
        if world.prompt_ready:
            yield PushWorld.finish
            yield PushWorld.expire_early
        if world.epoch - world.rewinds < PREEMPTIONS.get(world.shape, 0):
            yield replan
    if world.running and world.prompt_ready and world.is_provisional:
        yield PushWorld.accept
    if world.may_be_rewound and world.rewinds < REWINDS:
        yield lambda w: w.rewind(announced=True)
        if world.running:
            yield rewind_and_plan
    if world.revocable and world.epoch - world.rewinds < PREEMPTIONS.get(world.shape, 0):
        yield lambda w: w.preempt(announced=True)
    if world.session.accepts(push_protocol.PostReady):
        yield lambda w: w.send(push_protocol.PostReady())
        yield lambda w: w.send(push_protocol.PostReady(wait=True))
    if world.registrable:
        yield PushWorld.register
    if world.withdrawable:
        yield PushWorld.cancel
    if world.state is State.CONNECTING:
        yield lambda w: w.send(push_protocol.Connected())
        yield lambda w: w.send(push_protocol.LinkRefused())
    if world.pushed_by_vllm:
        yield PushWorld.push_ended_prompt if world.shape.other_blocks else PushWorld.post_whole
    if world.stock_write_busy:
        yield PushWorld.deliver
        if world.state is State.WRITING_WHOLE:
            yield PushWorld.post_whole_to_next_rank
        yield lambda w: w.deliver("cut off")
    for write in sorted(world.in_flight):
        yield lambda w, write=write: w.land(write)
        yield lambda w, write=write: w.lose(write)
    if world.session.accepts(push_protocol.Failed) and world.state is not State.NOTIFYING:
        yield PushWorld.fail
    if world.droppable:
        yield PushWorld.drop
    elif world.gone and world.session.accepts(push_protocol.LeaseExpired):
        yield lambda w: w.send(push_protocol.LeaseExpired())


STOPPED = (State.DRAINING, State.ABANDONED, State.CLOSED)
UNLIKE_IN_SESSIONS = ("registration", "failure", "in_flight", "_writes", "_coverage", "_ready_blocks")
UNLIKE_IN_WORLDS = ("session", "registration", "shape", "failure", "failures", "in_flight", "ever_posted")
ACCOUNT = ("ready", "posted", "landed", "told_tokens", "waits")


def replan(world: PushWorld) -> None:
    """A preemption that only the next plan shows."""
    world.preempt(announced=False)
    world.plan(4)


def rewind_and_plan(world: PushWorld) -> None:
    """A rewind that only the next plan shows."""
    world.rewind(announced=False)
    world.plan(4)


def likeness(world: PushWorld) -> str:
    """Equal for worlds with the same future. The reason of a failure and the numbers of WRITEs do not count. Nor does
    the world's account of blocks once the push has stopped: from then on a WRITE or a completion is an error by itself.
    """
    session = world.session
    writes = [(write.epoch, write.chunk, write.segments) for write in session.in_flight.values()]
    inner = {name: value for name, value in vars(session).items() if name not in UNLIKE_IN_SESSIONS}
    ready = {name: value for name, value in vars(session._ready_blocks).items() if name != "_pairs"}
    ignored = (*UNLIKE_IN_WORLDS, *(ACCOUNT if world.state in STOPPED else ()))
    outer = {name: value for name, value in vars(world).items() if name not in ignored}
    outer = {name: sorted(value) if isinstance(value, set) else value for name, value in outer.items()}
    drained = [failure.drained for failure in world.failures]
    return f"{writes}{session.failure is None}{inner}{ready}{outer}{drained}{world.ever_posted > 0}"


@cache
def explored(name: str) -> tuple[set[Triple], list[PushWorld]]:
    """The transitions of a push of this shape, and every reachable world."""
    first = PushWorld(SHAPES[name])
    first.plan(4)
    return explore(first, moves, clone, likeness, lambda world: world.session)


@pytest.fixture(scope="module", autouse=True)
def _forget_worlds() -> Iterator[None]:
    """Else each later garbage collection of this process would look at millions of objects."""
    yield
    explored.cache_clear()


@pytest.fixture(scope="module")
def homes() -> dict[State, list[PushWorld]]:
    """Worlds by the state of their session."""
    by_state: dict[State, list[PushWorld]] = {state: [] for state in State}
    for name in SHAPES:
        for world in explored(name)[1]:
            by_state[world.state].append(world)
    return by_state


@pytest.mark.parametrize("name", SHAPES)
def test_every_order_of_events_keeps_the_invariants(name: str) -> None:
    _, worlds = explored(name)
    assert {world.state for world in worlds} >= {State.WAITING, State.CLOSED}


@pytest.mark.parametrize("name", SHAPES)
def test_a_push_can_end_from_every_state(name: str) -> None:
    for world in explored(name)[1]:
        clone(world).drive_home()


def test_the_tables_hold_exactly_reachable_transitions_and_precautions() -> None:
    table = {(at, event, to) for at, row in TRANSITIONS.items() for event, after in row.items() for to in after}
    assert {to for at, _, to in table if at in STOPPED} <= {*STOPPED}, "`likeness` relies on it"
    ignored = {(at, event, at) for at, events in IGNORED.items() for event in events}
    assert not table & ignored
    taken = set().union(*(transitions for transitions, _ in map(explored, SHAPES)))
    assert taken <= table | ignored
    assert (table | ignored) - taken == PRECAUTIONS


def test_every_event_has_a_handler_and_every_state_a_row() -> None:
    events = {kind for kind in vars(push_protocol).values() if isinstance(kind, type) and issubclass(kind, Event)}
    assert set(PushSession.HANDLERS) == events - {Event}
    assert set(TRANSITIONS) == set(State)


def samples(world: PushWorld) -> list[Event]:
    """One event of every type, valid where possible."""
    chunk = world.chunks[-1] if world.chunks else None
    write = next(iter(world.in_flight), 0)
    return [
        *([push_protocol.Planned(chunk)] if chunk else []),
        push_protocol.Ready(world.epoch, 0, 0),
        push_protocol.PostReady(),
        push_protocol.Registered(world.registration),
        push_protocol.Connected(),
        push_protocol.LinkRefused(),
        push_protocol.WriteLanded(write),
        push_protocol.WriteLost(write, "no"),
        push_protocol.PrefixReported(0),
        push_protocol.Failed("no"),
        push_protocol.CancelledByD(),
        push_protocol.Notified(),
        push_protocol.WholePosted(),
        push_protocol.Preempted(),
        push_protocol.Rewound(),
        push_protocol.ResultsAccepted(),
        push_protocol.Finished(SAMPLED),
        push_protocol.Aborted(),
        push_protocol.LeaseExpired(),
    ]


@pytest.mark.parametrize("state", State)
def test_an_illegal_event_is_refused_and_changes_nothing(state: State, homes: dict[State, list[PushWorld]]) -> None:
    assert homes[state], "no world reaches this state"
    for world in homes[state][:: 1 + len(homes[state]) // 50]:
        before = likeness(world)
        for event in samples(world):
            if not world.session.accepts(type(event)):
                with pytest.raises(IllegalTransitionError, match=f"{type(event).__name__} while {state.name}"):
                    world.session.handle(event, 0.0)
                assert likeness(world) == before


@pytest.mark.parametrize(("state", "event"), sorted({(at, event) for at, event, _ in PRECAUTIONS}, key=str))
def test_precautions_are_handled(state: State, event: type[Event], homes: dict[State, list[PushWorld]]) -> None:
    for world in homes[state][:: 1 + len(homes[state]) // 50]:
        after = clone(world.session)
        sample = next(one for one in samples(world) if type(one) is event)
        after.handle(sample, 0.0)
        assert after.state in TRANSITIONS[state][event]
