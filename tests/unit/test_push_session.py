"""One push: merging of its WRITEs, then prompts of every shape. ``PushWorld`` checks each step.

``test_push_session_explored.py`` has every order of events of smaller prompts.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.first_token import Sampled
from layerpush.core.machine import IllegalTransitionError
from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import PromptProgress
from layerpush.core.write import MismatchError, Write
from layerpush.prefill import push_protocol
from layerpush.prefill.push_protocol import State
from layerpush.prefill.push_session import PushSession
from tests.unit.builders import blocks_of, chunks_of, registration, table_of
from tests.unit.push_world import PushWorld, Shape


def world_of(state: State, tokens: int = 8, layers: int = 2, **shape: Any) -> PushWorld:
    """Blocks of four tokens; WAITING or STREAMING with its first chunk planned and nothing ready."""
    world = PushWorld(Shape(tokens, (0,) * layers, (4,), (blocks_of(tokens, 4),), **shape))
    world.plan(4)
    if state is State.STREAMING:
        world.register()
        world.send(push_protocol.Connected())
    assert world.state is state
    return world


def posted(world: PushWorld, *, wait: bool = False) -> list[Write]:
    """The WRITEs that one ``PostReady`` posts."""
    before = set(world.in_flight)
    world.send(push_protocol.PostReady(wait))
    return [write for number, write in world.in_flight.items() if number not in before]


def parts(world: PushWorld, *, wait: bool = False) -> list[list[tuple[slice, int, int]]]:
    """(layers, first block, end) of each segment of these WRITEs."""
    return [[(part.layers, part.first, part.end) for part in write.segments] for write in posted(world, wait=wait)]


def test_a_late_registration_posts_all_ready_blocks() -> None:
    world = world_of(State.WAITING)
    world.sweep()
    world.plan(4)
    world.hook(0)
    world.register()
    assert not world.session.accepts(push_protocol.PostReady)
    world.send(push_protocol.Connected())
    assert parts(world) == [[(slice(0, 1), 0, 2), (slice(1, 2), 0, 1)]]


def test_waiting_layers_merge_until_a_post_or_the_end_of_their_chunk() -> None:
    world = world_of(State.STREAMING, layers=4)
    written = []
    for layer, wait in enumerate([True, False, True, True]):
        world.hook(layer)
        written.append([segments[0][0] for segments in parts(world, wait=wait)])
    assert written == [[], [slice(0, 2)], [], [slice(2, 4)]]


def test_ready_layers_merge_while_the_wire_is_full() -> None:
    world = world_of(State.STREAMING, layers=4, max_in_flight=1)
    world.hook(0)
    [first] = posted(world)
    world.hook(1)
    world.hook(2)
    assert posted(world) == []
    world.land(first.id)
    assert parts(world) == [[(slice(1, 3), 0, 1)]]


def test_a_layer_of_an_old_epoch_is_not_ready_in_the_next_one() -> None:
    world = world_of(State.STREAMING)
    world.preempt(announced=True)
    world.plan(4)
    world.stale_hook(0)
    assert posted(world) == []


def test_d_hears_once_of_a_failure_while_writes_are_on_the_wire() -> None:
    world = world_of(State.STREAMING, layers=3)
    writes = []
    for layer in range(3):
        world.hook(layer)
        writes += posted(world)
    for write in writes:
        world.lose(write.id)
    assert [failure.drained for failure in world.failures] == [False, True]


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        ([[1, 2]], r"\[2\] blocks of a prompt of \[1\]"),
        ([[1], [2]], "2 KV cache groups, the prompt 1"),
    ],
)
def test_a_registration_that_does_not_fit_the_prompt_is_an_error(groups: list[list[int]], error: str) -> None:
    session = PushSession("p-1", (0,), (10,), PushMode.LAYER)
    session.handle(push_protocol.Planned(chunks_of(4, [4], [[7]], [4])[0]), 0.0)
    session.handle(push_protocol.Registered(registration(*groups)), 0.0)
    with pytest.raises(MismatchError, match=error):
        session.handle(push_protocol.Connected(), 0.0)
    assert session.state is State.CONNECTING


def test_a_chunk_out_of_order_is_an_error() -> None:
    session = PushSession("p-1", (0,), (10,), PushMode.LAYER)
    chunks = chunks_of(12, [4], [[7, 8, 9]], [4])
    session.handle(push_protocol.Planned(chunks[0]), 0.0)
    with pytest.raises(IllegalTransitionError, match="chunk 2 follows 1"):
        session.handle(push_protocol.Planned(chunks[2]), 0.0)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    tokens = draw(st.integers(1, 200))
    sizes = tuple(draw(st.lists(st.sampled_from([4, 16, 32]), min_size=1, max_size=2)))
    least = draw(st.sampled_from([0, 1, 1, 1]))
    return Shape(
        tokens,
        layer_groups=tuple(draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=5))),
        block_sizes=sizes,
        wanted=tuple(draw(st.integers(1, blocks_of(tokens, size))) if least else 0 for size in sizes),
        mode=draw(st.sampled_from([PushMode.LAYER, PushMode.CHUNK])),
        max_in_flight=draw(st.sampled_from([1, 2, 8, 100])),
        nulls=(0, draw(st.integers(0, 3)), 0),
    )


@given(shapes(), st.integers(0, 1 << 30))
def test_the_whole_request_is_pushed_for_any_chunks(shape: Shape, seed: int) -> None:
    """Layers in any order, WRITEs that land in any order, D registered at any time, a preemption or none."""
    world, random = PushWorld(shape), Random(seed)
    preempts_at = random.choice([None, random.randrange(shape.tokens)])
    while not world.prompt_ready:
        world.plan(random.randint(1, 80))
        if world.state is State.WAITING and random.random() < 0.5:
            world.register()
            world.send(push_protocol.Connected())
        for layer in random.sample(range(len(shape.layer_groups)), len(shape.layer_groups)):
            world.hook(layer)
            if world.session.accepts(push_protocol.PostReady):
                world.send(push_protocol.PostReady())
            while world.in_flight and random.random() < 0.5:
                world.land(random.choice(sorted(world.in_flight)))
        if preempts_at is not None and world.computed > preempts_at:
            preempts_at = None
            world.preempt(announced=world.state is State.NOTIFYING or random.random() < 0.5)
    world.drive_home()
    assert world.notified or world.delivered


def finished(sampling: str | None, sampled: Sampled | None, *, first: bool) -> list[push_protocol.Action]:
    """The first tokens that are sent when D registers before P has finished, or after."""
    session = PushSession("p-1", (0,), (10,), PushMode.LAYER)
    events = [
        push_protocol.Registered(registration([1], layerpush=1, sampling=sampling)),
        push_protocol.Finished(sampled),
    ]
    actions = [action for event in (events if first else events[::-1]) for action in session.handle(event, 0.0)]
    return [action for action in actions if isinstance(action, push_protocol.SendFirstToken)]


@pytest.mark.parametrize("first", [True, False], ids=["registered first", "finished first"])
def test_the_first_token_is_sent_only_to_a_d_with_equal_sampling(first: bool) -> None:
    asked = registration([1], layerpush=1, sampling="greedy")
    assert finished("greedy", Sampled(7, "greedy"), first=first) == [push_protocol.SendFirstToken(asked, 7)]
    assert finished("greedy", Sampled(7, "warmer"), first=first) == [push_protocol.SendFirstToken(asked, None)]
    assert finished("greedy", None, first=first) == [push_protocol.SendFirstToken(asked, None)]
    assert finished(None, Sampled(7, "greedy"), first=first) == []


def test_a_push_that_has_failed_sends_no_first_token() -> None:
    """D has cancelled, and does not wait for it."""
    world = world_of(State.STREAMING)
    world.hook(0)
    posted(world)
    world.cancel()
    before = world.tokens
    world.send(push_protocol.Finished(Sampled(7, "greedy")))
    assert world.tokens == before


def test_the_session_names_the_parameters_that_differ() -> None:
    ours = Sampled(7, "warm", (("temperature", "a"), ("top_p", "b"), ("min_tokens", "c")))
    assert ours.differing((("temperature", "a"), ("top_p", "x"), ("min_p", "d"))) == ("min_p", "min_tokens", "top_p")
    asked = registration([1], layerpush=1, sampling="greedy")
    assert finished("greedy", ours, first=True) == [
        push_protocol.SendFirstToken(asked, None, ("min_tokens", "temperature", "top_p"))
    ]


def test_kept_blocks_count_as_planned_and_as_posted_after_a_preemption() -> None:
    """The schedule asks for these bytes: they must not hide those of other prompts."""
    progress, table = PromptProgress("p-1", (4,)), table_of(16, 4)
    session = PushSession("p-1", (0,), (10,), PushMode.LAYER)
    first = chunks_of(16, [8], [table], [4], progress)[0]
    for event in (
        push_protocol.Planned(first),
        push_protocol.Registered(registration(table, number=1)),
        push_protocol.Connected(),
        push_protocol.Ready(0, 0, 0),
        push_protocol.PostReady(),
        push_protocol.WriteLanded(0),
        push_protocol.PrefixReported(0),
        push_protocol.Preempted(),
    ):
        session.handle(event, 0.0)
    progress.restart()
    bytes_left = [session.unposted_bytes]
    for chunk in chunks_of(16, [4, 4, 8], [table], [4], progress):
        session.handle(push_protocol.Planned(chunk), 0.0)
        bytes_left.append(session.unposted_bytes)
        assert session.chunk_bytes == (20 if chunk.final else 0)
    assert bytes_left == [0, 0, 0, 20]
