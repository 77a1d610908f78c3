"""D hears which chunks of a prompt have landed. It may keep them, so P never writes there again."""

from __future__ import annotations

import pytest

from layerpush.core.wire import Completion, Message, PrefixLanded, Registration, read
from tests.unit.both_sides.process import BLOCK_SIZE
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld

NUMBER, TOKENS = 7, 4 * BLOCK_SIZE + 1


def registered(number: int = NUMBER, wanted: int | None = None) -> tuple[ScriptedWorld, ScriptedRequest, Registration]:
    world = ScriptedWorld()
    world.decoder()
    prompt = ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
    details = {} if wanted is None else {"wanted": wanted}
    return world, prompt, world.registers(prompt, number=number, **details)


def heard(world: ScriptedWorld) -> list[Message]:
    """The messages that D has got since the last look, when all WRITEs have landed."""
    world.settle()
    (messages,) = world.d.received()
    return [read(payload) for payload in messages]


def landed(tokens: int) -> PrefixLanded:
    return PrefixLanded("d-p-1", NUMBER, tokens)


def written(world: ScriptedWorld) -> set[int]:
    """D's blocks that the next WRITEs go to."""
    ids = [write.remote.tolist() for write in world.fabric.writes]
    return {index % world.memory_blocks[1] for each in ids for index in each}


def test_d_hears_of_each_chunk_but_the_last() -> None:
    world, prompt, _ = registered()
    world.step((prompt, BLOCK_SIZE + 1))
    assert heard(world) == [landed(BLOCK_SIZE)], "only full blocks are written"
    world.step((prompt, 2 * BLOCK_SIZE))
    assert heard(world) == [landed(3 * BLOCK_SIZE)]
    world.step((prompt, TOKENS))
    assert heard(world) == [Completion("d-p-1", 1)]


def test_a_d_that_does_not_ask_hears_nothing() -> None:
    world, prompt, wanted = registered(number=0)
    world.step((prompt, 2 * BLOCK_SIZE))
    world.step((prompt, TOKENS))
    world.settle()
    world.assert_delivered(prompt, wanted)


def test_d_hears_nothing_of_blocks_that_it_had() -> None:
    world, prompt, _ = registered(wanted=3)
    world.step((prompt, 2 * BLOCK_SIZE))
    assert heard(world) == []
    world.step((prompt, BLOCK_SIZE))
    assert heard(world) == [landed(3 * BLOCK_SIZE)]


def test_d_hears_of_a_chunk_when_all_its_layers_have_landed() -> None:
    world, prompt, _ = registered()
    world.fabric.faults.hold_writes = {0: 50}
    world.step((prompt, 2 * BLOCK_SIZE))
    world.step((prompt, BLOCK_SIZE))
    assert world.d.received() == [[]]
    assert heard(world) == [landed(3 * BLOCK_SIZE)]


def test_a_preempted_push_does_not_write_again_what_d_has_heard_of() -> None:
    world, prompt, wanted = registered()
    world.step((prompt, 2 * BLOCK_SIZE))
    assert heard(world) == [landed(2 * BLOCK_SIZE)]
    before = len(world.fabric.writes)
    world.preempt(prompt, list(range(9, 15)))
    world.step((prompt, 3 * BLOCK_SIZE))
    assert heard(world) == [landed(3 * BLOCK_SIZE)]
    world.step((prompt, TOKENS))
    world.settle()
    targets = list(wanted.local_block_ids[0])
    del world.fabric.writes[:before]
    assert written(world) == set(targets[2:])
    world.assert_delivered(prompt, wanted)


def test_d_does_not_hear_of_less_than_before() -> None:
    """P would write again what D has heard of."""
    world, prompt, _ = registered()
    world.step((prompt, 2 * BLOCK_SIZE))
    assert heard(world) == [landed(2 * BLOCK_SIZE)]
    world.preempt(prompt, list(range(9, 15)))
    world.step((prompt, BLOCK_SIZE))
    world.step((prompt, 2 * BLOCK_SIZE))
    assert heard(world) == [landed(3 * BLOCK_SIZE)]


def test_d_hears_nothing_of_steps_that_may_be_taken_back() -> None:
    """Nor of later ones: another connector may report a lost block late."""
    world, prompt, _ = registered()
    prompt.progress.provisional = True
    world.step((prompt, BLOCK_SIZE))
    assert heard(world) == []
    prompt.progress.provisional = False
    world.step((prompt, BLOCK_SIZE))
    assert heard(world) == []


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_d_hears_nothing_of_blocks_that_were_taken_away_meanwhile(how: str) -> None:
    """The message is checked against the scheduler's newest orders, not against the last turn's."""
    world, prompt, wanted = registered()
    world.fabric.faults.hold_writes = dict.fromkeys(range(world.layers), 8)
    world.step((prompt, 2 * BLOCK_SIZE))
    assert world.writer.writes_in_flight("p-1")
    world.writer._take_step_events()  # this turn has read its events when the scheduler takes the blocks away
    if how == "aborted":
        world.abort(prompt)
    else:
        world.preempt(prompt, list(range(9, 15)))
        world.arm(prompt, TOKENS, preempted=("p-1",))
    for _ in range(30):
        world.writer._poll()
    assert world.d.received() == [[]]
    if how == "preempted":
        world.capture.sweep()
        world.settle()
        world.assert_delivered(prompt, wanted)


@pytest.mark.parametrize("how", ["taken back", "aborted"])
def test_d_keeps_nothing_that_p_doubts(how: str) -> None:
    """vLLM takes back a step of a prompt that it has not called provisional."""
    world, prompt, _ = registered()
    world.step((prompt, 2 * BLOCK_SIZE))
    assert heard(world) == [landed(2 * BLOCK_SIZE)]
    if how == "aborted":
        world.abort(prompt)
    else:
        world.capture.revoke(rewound=("p-1",))
    world.settle()
    assert [failure.void for failure in world.rank.failures] == [how == "taken back"]
