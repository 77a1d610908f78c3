"""When ready layers become a WRITE: floors, limits, whole chunks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from layerpush.core import push_protocol
from layerpush.core.push_policy import Policy
from layerpush.core.push_protocol import State
from tests.unit.session_world import LAYER_BYTES, PushWorld, Shape, pairs_in


def streaming(policy: Policy, layers: int = 4, tokens: int = 8, block_size: int = 4) -> PushWorld:
    wanted = -(-tokens // block_size)
    world = PushWorld(Shape(tokens, (0,) * layers, (block_size,), (wanted,), policy))
    world.plan(block_size)
    world.register()
    world.send(push_protocol.Connected())
    return world


def posted_by(world: PushWorld) -> list[list[int]]:
    """The layers of each WRITE that one pump posts."""
    before = set(world.in_flight)
    world.send(push_protocol.PostReady())
    return [sorted(pairs_in(write)) for number, write in world.in_flight.items() if number not in before]


def test_layers_merge_up_to_the_floor() -> None:
    world = streaming(Policy(min_write_bytes=2 * LAYER_BYTES))
    world.hook(0)
    assert posted_by(world) == []
    world.hook(1)
    assert posted_by(world) == [[0, 1]]
    world.hook(2)
    assert posted_by(world) == []


def test_the_end_of_a_chunk_goes_below_the_floor() -> None:
    world = streaming(Policy(min_write_bytes=1 << 20))
    for layer in range(3):
        world.hook(layer)
        assert posted_by(world) == []
    world.hook(3)
    assert posted_by(world) == [[0, 1, 2, 3]]


def test_with_no_floor_a_layer_goes_alone() -> None:
    world = streaming(Policy(min_write_bytes=0))
    world.hook(2)
    assert posted_by(world) == [[2]]


def test_a_full_wire_merges_what_becomes_ready() -> None:
    world = streaming(Policy(max_in_flight=1))
    world.hook(0)
    assert posted_by(world) == [[0]]
    world.hook(1)
    world.hook(2)
    assert posted_by(world) == []
    world.land(0)
    assert posted_by(world) == [[1, 2]]


def test_by_chunk_nothing_goes_in_the_middle_of_a_chunk() -> None:
    world = streaming(Policy(by_layer=False))
    for layer in (3, 1, 0):
        world.hook(layer)
        assert posted_by(world) == []
    world.hook(2)
    assert posted_by(world) == [[0, 1, 2, 3]]
    world.plan(4)
    world.hook(0)
    assert posted_by(world) == []


def test_by_chunk_an_early_layer_of_the_next_chunk_waits_for_it() -> None:
    world = streaming(Policy(by_layer=False))
    world.sweep()
    world.plan(4)
    world.hook(0)
    world.send(push_protocol.PostReady())
    (write,) = world.in_flight.values()
    assert {(part.first, part.end) for part in write.segments} == {(0, 1)}


def test_blocks_that_the_decode_engine_has_cost_no_write() -> None:
    world = PushWorld(Shape(8, (0, 0), (4,), (1,)))
    world.plan(4)
    world.register()
    world.send(push_protocol.Connected())
    world.sweep()
    assert posted_by(world) == []
    world.plan(4)
    world.sweep()
    assert posted_by(world) == [[0, 1]]


def test_nothing_wanted_is_told_at_the_end_of_prefill() -> None:
    world = PushWorld(Shape(4, (0,), (4,), (0,)))
    world.plan(4)
    world.register()
    world.send(push_protocol.Connected())
    assert posted_by(world) == []
    assert world.state is State.STREAMING
    world.sweep()
    assert posted_by(world) == []
    assert world.state is State.NOTIFYING


@settings(deadline=None)
@given(
    floor=st.integers(0, 120),
    limit=st.sampled_from([1, 2, 3, 100]),
    by_layer=st.booleans(),
    layers=st.integers(1, 6),
    chunks=st.integers(1, 4),
    data=st.data(),
)
def test_floor_and_limit_hold_in_any_order(
    floor: int, limit: int, by_layer: bool, layers: int, chunks: int, data: st.DataObject
) -> None:
    world = streaming(Policy(by_layer, floor, limit), layers, tokens=4 * chunks)
    for chunk in range(chunks):
        if chunk:
            world.plan(4)
        for layer in data.draw(st.permutations(range(layers))):
            world.hook(layer)
            before = set(world.in_flight)
            world.send(push_protocol.PostReady())
            new = [write for number, write in world.in_flight.items() if number not in before]
            if world.unready and limit == 100:  # on a full wire the end of a chunk may wait until the next has begun
                assert all(by_layer and write.size >= floor for write in new)
            while world.in_flight and data.draw(st.booleans()):
                world.land(data.draw(st.sampled_from(sorted(world.in_flight))))
    world.drive_home()
    assert world.tells == 1
