"""The story of one push, row by row of the protocol: each example is a few events long."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerpush.core import push_protocol
from layerpush.core.coverage import MismatchError
from layerpush.core.machine import IllegalTransitionError
from layerpush.core.push_policy import Policy
from layerpush.core.push_protocol import Post, State, Write
from layerpush.core.push_session import Session
from tests.unit.builders import blocks_of, chunks_of, registration, upstream_pairs
from tests.unit.session_world import PushWorld, Shape


def world_of(state: State, tokens: int = 8, layers: int = 2, policy: Policy | None = None) -> PushWorld:
    """Two blocks of four tokens; WAITING, CONNECTING or STREAMING with its first chunk planned and nothing ready."""
    world = PushWorld(Shape(tokens, (0,) * layers, (4,), (blocks_of(tokens, 4),), policy or Policy()))
    world.plan(4)
    if state is not State.WAITING:
        world.register()
    if state is State.STREAMING:
        world.send(push_protocol.Connected())
    assert world.state is state
    return world


def pump(world: PushWorld) -> list[Write]:
    """The WRITEs that one pump posts."""
    before = set(world.in_flight)
    world.send(push_protocol.Pump())
    return [write for number, write in world.in_flight.items() if number not in before]


def land_all(world: PushWorld) -> None:
    for write in list(world.in_flight):
        world.land(write)


def retractions(world: PushWorld) -> list[tuple[str, bool]]:
    return [(retract.reason, retract.drained) for retract in world.retracts]


def told(world: PushWorld) -> PushWorld:
    world.sweep()
    world.plan(4)
    world.sweep()
    pump(world)
    land_all(world)
    world.confirm_tell()
    return world


def test_registered_first_every_layer_goes_as_it_is_ready() -> None:
    world = world_of(State.STREAMING)
    world.hook(0)
    assert [write.segments[0].layers for write in pump(world)] == [slice(0, 1)]
    world.hook(1)
    assert [write.segments[0].layers for write in pump(world)] == [slice(1, 2)]
    world.plan(4)
    world.sweep()
    (both,) = pump(world)
    assert [(part.layers, part.first, part.end) for part in both.segments] == [(slice(0, 2), 1, 2)]
    land_all(world)
    assert world.state is State.NOTIFYING


def test_registered_late_catches_up_with_all_that_is_ready() -> None:
    world = world_of(State.WAITING)
    world.sweep()
    world.plan(4)
    world.hook(0)
    assert pump(world) == []
    world.register()
    assert pump(world) == []
    world.send(push_protocol.Connected())

    (write,) = pump(world)
    assert [(part.layers, part.first, part.end) for part in write.segments] == [
        (slice(0, 1), 0, 2),
        (slice(1, 2), 0, 1),
    ]


def test_never_registered_goes_whole() -> None:
    world = world_of(State.WAITING)
    world.sweep()
    world.plan(4)
    world.sweep()
    world.finish()
    assert (world.state, world.delegates) == (State.DELEGATED, [None])
    world.register()
    assert (world.state, world.delegates) == (State.DELEGATED, [None, world.registration])
    world.post_whole()
    world.deliver()
    assert (world.state, world.releases, world.retracts) == (State.CLOSED, 1, [])


def test_refused_before_the_end_goes_whole_after_it() -> None:
    world = world_of(State.CONNECTING)
    world.send(push_protocol.Refused("unequal blocks"))
    assert (world.state, world.delegates) == (State.DEFERRED, [])
    world.sweep()
    world.plan(4)
    world.sweep()
    world.finish()
    assert (world.state, world.delegates) == (State.DELEGATED, [world.registration])


def test_refused_after_the_end_goes_whole_at_once() -> None:
    world = world_of(State.CONNECTING, tokens=4)
    world.sweep()
    world.finish()
    assert world.state is State.CONNECTING
    world.send(push_protocol.Refused("unequal blocks"))
    assert (world.state, world.delegates) == (State.DELEGATED, [world.registration])


def test_a_session_that_only_watches_never_connects() -> None:
    world = world_of(State.WAITING, policy=Policy(streams=False))
    world.register()
    assert world.state is State.DEFERRED


def test_told_before_it_is_finished_waits_for_the_scheduler() -> None:
    world = told(world_of(State.STREAMING))
    assert (world.state, world.releases) == (State.NOTIFIED, 0)
    world.finish()
    assert (world.state, world.releases) == (State.CLOSED, 1)


def test_finished_before_the_last_write_landed_is_released_after_it() -> None:
    world = world_of(State.STREAMING, tokens=4)
    world.sweep()
    pump(world)
    world.finish()
    assert (world.state, world.releases) == (State.STREAMING, 0)
    land_all(world)
    world.confirm_tell()
    assert (world.state, world.releases) == (State.CLOSED, 1)


def test_preempted_with_writes_in_flight_posts_nothing_until_they_end() -> None:
    world = world_of(State.STREAMING)
    world.sweep()
    pump(world)
    world.preempt(announced=True)
    assert world.state is State.REWINDING
    world.plan(8)
    world.sweep()
    assert pump(world) == []
    land_all(world)
    assert world.state is State.STREAMING
    (again,) = pump(world)
    assert (again.epoch, again.segments[0].source) == (1, (2000, 2001))
    land_all(world)
    assert world.state is State.NOTIFYING


def test_preempted_with_nothing_in_flight_goes_on() -> None:
    world = world_of(State.STREAMING)
    world.sweep()
    pump(world)
    land_all(world)
    world.preempt(announced=True)
    assert world.state is State.STREAMING
    assert world.session.epoch == 1


def test_a_hook_of_an_old_epoch_makes_nothing_ready() -> None:
    world = world_of(State.STREAMING)
    world.preempt(announced=True)
    world.plan(4)
    world.stale_hook(0)
    assert pump(world) == []


def test_a_lost_write_fails_the_push_once_the_others_have_ended() -> None:
    world = world_of(State.STREAMING)
    world.hook(0)
    pump(world)
    world.hook(1)
    pump(world)
    world.lose(0)
    assert world.state is State.DRAINING
    assert retractions(world) == [("cut off", False)]
    assert pump(world) == []
    world.land(1)
    assert (world.state, world.session.failure) == (State.ABANDONED, "cut off")
    assert retractions(world) == [("cut off", False), ("cut off", True)]
    world.plan(4)
    world.sweep()
    assert world.releases == 0
    world.finish()
    assert (world.state, world.releases) == (State.CLOSED, 1)
    assert len(world.retracts) == 2


def test_a_lost_write_that_was_the_last_on_the_wire_is_told_once() -> None:
    world = world_of(State.STREAMING)
    world.hook(0)
    pump(world)
    world.lose(0)
    assert (world.state, retractions(world)) == (State.ABANDONED, [("cut off", True)])


@pytest.mark.parametrize("finished", [True, False])
def test_a_failed_push_gives_the_blocks_back_when_it_has_drained_and_the_scheduler_has_finished(finished: bool) -> None:
    """Not at the end of a lease, and not a moment before the last WRITE has ended."""
    world = world_of(State.STREAMING, tokens=4)
    world.sweep()
    pump(world)
    if finished:
        world.finish()
    world.fail()
    assert (world.state, world.releases, retractions(world)) == (State.DRAINING, 0, [("broken", False)])
    land_all(world)
    assert retractions(world)[1:] == [("broken", True)]
    if not finished:
        assert (world.state, world.releases) == (State.ABANDONED, 0)
        world.finish()
    assert (world.state, world.releases) == (State.CLOSED, 1)


@pytest.mark.parametrize("state", [State.CONNECTING, State.STREAMING])
def test_withdrawn_with_nothing_on_the_wire_it_is_over_at_once(state: State) -> None:
    world = world_of(state)
    world.withdraw()
    assert (world.state, [retract.drained for retract in world.retracts]) == (State.ABANDONED, [True])
    world.sweep()
    world.plan(4)
    world.sweep()
    assert pump(world) == []
    world.finish()
    assert (world.state, world.releases, len(world.retracts)) == (State.CLOSED, 1, 1)
    assert world.session.cancelled


def test_withdrawn_with_writes_on_the_wire_it_is_over_when_they_have_ended() -> None:
    world = world_of(State.STREAMING)
    world.sweep()
    pump(world)
    world.withdraw()
    world.withdraw()
    assert (world.state, world.retracts) == (State.DRAINING, [])
    assert pump(world) == []
    land_all(world)
    assert (world.state, [retract.drained for retract in world.retracts]) == (State.ABANDONED, [True])


def test_withdrawn_with_several_writes_on_the_wire_it_is_over_when_the_last_has_ended() -> None:
    world = world_of(State.STREAMING)
    for layer in (0, 1):
        world.hook(layer)
        pump(world)
    world.plan(4)
    world.hook(0)
    pump(world)
    world.withdraw()
    for write in (2, 0):
        world.land(write)
        assert (world.state, world.retracts) == (State.DRAINING, [])
    world.fail()
    world.land(1)
    assert (world.state, [retract.drained for retract in world.retracts]) == (State.ABANDONED, [True])


def test_a_failure_is_warned_of_once() -> None:
    world = world_of(State.STREAMING)
    for layer in (0, 1):
        world.hook(layer)
        pump(world)
    world.fail()
    world.lose(1)
    world.send(push_protocol.Failed("broken again"))
    assert retractions(world) == [("broken", False)]
    world.land(0)
    assert retractions(world) == [("broken", False), ("broken", True)]


def test_withdrawn_before_the_request_was_there_it_is_released_when_prefill_is_over() -> None:
    world = world_of(State.WAITING, tokens=4)
    world.sweep()
    world.finish()
    world.withdraw()
    assert (world.state, world.releases, world.retracts) == (State.CLOSED, 1, [])
    assert world.session.cancelled


def test_withdrawn_before_its_blocks_are_looked_at_again_after_a_preemption() -> None:
    world = world_of(State.STREAMING)
    world.sweep()
    pump(world)
    world.preempt(announced=True)
    world.withdraw()
    assert (world.state, world.retracts) == (State.DRAINING, [])
    land_all(world)
    assert [(retract.epoch, retract.drained) for retract in world.retracts] == [(1, True)]


def test_withdrawn_under_upstreams_write_it_is_over_when_that_has_ended() -> None:
    world = world_of(State.WAITING, tokens=4)
    world.sweep()
    world.finish()
    world.register()
    world.post_whole()
    world.withdraw()
    assert (world.state, world.retracts, world.releases) == (State.DELEGATED, [], 0)
    world.deliver()
    assert (world.state, [retract.drained for retract in world.retracts]) == (State.CLOSED, [True])
    assert (world.releases, world.session.told) == (1, False)


def test_withdrawn_before_upstream_wrote_anything_it_is_over() -> None:
    world = world_of(State.WAITING, tokens=4, policy=Policy(streams=False))
    world.register()
    world.sweep()
    world.finish()
    world.withdraw()
    assert (world.state, world.releases, len(world.retracts)) == (State.CLOSED, 1, 1)


def test_upstreams_write_that_was_lost_is_retracted() -> None:
    world = world_of(State.WAITING, tokens=4)
    world.sweep()
    world.finish()
    world.register()
    world.post_whole()
    world.deliver("cut off")
    assert (world.state, world.releases, retractions(world)) == (State.CLOSED, 1, [("cut off", True)])


def test_a_failed_push_that_is_withdrawn_has_still_failed() -> None:
    """A decode engine that hears of a failure asks for its blocks: that makes it nobody's wish."""
    world = world_of(State.STREAMING)
    world.sweep()
    pump(world)
    world.fail()
    world.withdraw()
    land_all(world)
    assert (world.session.failure, world.session.cancelled) == ("broken", False)


def test_nobody_is_told_of_the_end_of_a_push_that_nobody_registered() -> None:
    world = world_of(State.WAITING)
    world.drop()
    assert (world.state, world.retracts) == (State.CLOSED, [])


@pytest.mark.parametrize("in_flight", [True, False])
def test_an_abort_drains_and_never_tells(in_flight: bool) -> None:
    world = world_of(State.STREAMING)
    world.sweep()
    pump(world)
    if not in_flight:
        land_all(world)
    world.drop()
    assert world.state is (State.DRAINING if in_flight else State.CLOSED)
    assert retractions(world) == ([] if in_flight else [("aborted", True)])
    land_all(world)
    assert (world.state, world.session.failure, world.tells) == (State.CLOSED, "aborted", 0)
    assert retractions(world) == [("aborted", True)]


def test_a_lease_that_ran_out_is_a_failure_unless_the_peer_knows() -> None:
    waiting = world_of(State.CONNECTING, tokens=4)
    waiting.sweep()
    waiting.finish()
    waiting.drop()
    assert (waiting.state, waiting.session.failure) == (State.CLOSED, "its lease ran out")
    assert retractions(waiting) == [("its lease ran out", True)]
    knows = told(world_of(State.STREAMING))
    knows.drop()
    assert (knows.state, knows.session.failure, knows.retracts) == (State.CLOSED, None, [])


def test_a_completion_that_cannot_be_sent_fails_the_push() -> None:
    world = world_of(State.STREAMING, tokens=4)
    world.sweep()
    pump(world)
    land_all(world)
    assert world.state is State.NOTIFYING
    world.fail()
    assert (world.state, world.releases) == (State.ABANDONED, 0)
    assert retractions(world) == [("broken", True)]


def test_a_registration_of_more_blocks_than_the_prompt_has_is_an_error() -> None:
    session = Session("p-1", (0,), (10,), Policy())
    session.handle(push_protocol.Planned(chunks_of(4, [4], [[7]], [4])[0]))
    session.handle(push_protocol.Registered(registration([1, 2])))
    with pytest.raises(MismatchError, match=r"\[2\] blocks of a prompt of \[1\]"):
        session.handle(push_protocol.Connected())
    assert session.state is State.CONNECTING


def test_a_registration_of_other_cache_groups_is_an_error() -> None:
    session = Session("p-1", (0,), (10,), Policy())
    session.handle(push_protocol.Planned(chunks_of(4, [4], [[7]], [4])[0]))
    session.handle(push_protocol.Registered(registration([1], [2])))
    with pytest.raises(MismatchError, match="2 KV cache groups, the prompt 1"):
        session.handle(push_protocol.Connected())


def test_a_chunk_out_of_order_is_an_error() -> None:
    session = Session("p-1", (0,), (10,), Policy())
    chunks = chunks_of(12, [4], [[7, 8, 9]], [4])
    session.handle(push_protocol.Planned(chunks[0]))
    with pytest.raises(IllegalTransitionError, match="chunk 2 follows 1"):
        session.handle(push_protocol.Planned(chunks[2]))


@st.composite
def streams(draw: st.DrawFn) -> tuple[Shape, list[int], int]:
    tokens = draw(st.integers(1, 200))
    sizes = tuple(draw(st.lists(st.sampled_from([4, 16, 32]), min_size=1, max_size=2)))
    groups = tuple(draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=5)))
    wanted = tuple(draw(st.integers(0, blocks_of(tokens, size))) for size in sizes)
    policy = Policy(draw(st.booleans()), draw(st.sampled_from([0, 25, 1000])), draw(st.integers(1, 8)))
    return (
        Shape(tokens, groups, sizes, wanted, policy),
        draw(st.lists(st.integers(1, 80), min_size=1)),
        draw(st.integers(0, 9)),
    )


@settings(deadline=None)
@given(streams(), st.randoms(use_true_random=False))
def test_whatever_the_chunks_the_whole_request_goes(stream: tuple[Shape, list[int], int], random: Random) -> None:
    """The union of all segments is upstream's mapping of the whole request, for every layer."""
    shape, steps, registers_after = stream
    tables = [shape.table(group, 0) for group in range(len(shape.block_sizes))]
    session = Session("p-1", shape.layer_groups, [10] * len(shape.layer_groups), shape.policy)
    sent: dict[int, list[tuple[int, int]]] = {layer: [] for layer in range(len(shape.layer_groups))}
    chunks = chunks_of(shape.tokens, steps, tables, shape.block_sizes)
    for index, chunk in enumerate(chunks):
        session.handle(push_protocol.Planned(chunk))
        if index == min(registers_after, len(chunks) - 1):
            session.handle(push_protocol.Registered(registration(*map(shape.targets, range(len(tables))))))
            session.handle(push_protocol.Connected())
        for layer in random.sample(range(len(shape.layer_groups)), len(shape.layer_groups)):
            session.handle(push_protocol.Ready(0, chunk.index, layer))
            _collect(session, sent)
    while session.state is State.STREAMING:
        _collect(session, sent, land=True)

    assert session.state is State.NOTIFYING
    for layer, group in enumerate(shape.layer_groups):
        assert sorted(sent[layer]) == sorted(upstream_pairs(tables[group], shape.targets(group)))


def _collect(session: Session, sent: dict[int, list[tuple[int, int]]], *, land: bool = False) -> None:
    for action in session.handle(push_protocol.Pump()):
        if isinstance(action, Post):
            for part in action.write.segments:
                for layer in range(part.layers.start, part.layers.stop):
                    sent[layer] += zip(part.source, part.target, strict=True)
    if land or len(session.in_flight) > 2:
        for write in list(session.in_flight)[-1:]:
            session.handle(push_protocol.Landed(write))
