"""Long prompts whose pushes fail half-way: some of their chunks have landed."""

from __future__ import annotations

import random
from typing import Any

from layerpush.core.push_mode import PushMode
from tests.support.fake_transport import Faults
from tests.unit.both_sides import moves
from tests.unit.both_sides.moves import MOVES, Pick
from tests.unit.both_sides.process import BLOCK_SIZE, Prompt
from tests.unit.both_sides.storm import drawn_decode_ranks
from tests.unit.both_sides.world import World

TOKENS = 4 * BLOCK_SIZE
PART_THAT_ENDS = 0.7


def compute(world: World, pick: Pick) -> None:
    """P computes the next layer, of a block or of two for each prompt. Another connector may have the first block."""
    prefill = world.prefill
    assert prefill is not None
    if prefill.step is None:
        loaded = pick([0, 0, 0, 1])
        request = pick([each for each in world.requests if each.leased_until is None and not each.is_computed])
        prefill.begin_step(request, pick([1, 2]) * BLOCK_SIZE, 0, loaded, pick([None, 0]))
    else:
        prefill.run_layer(hooked=pick([True, True, False]))


def may_compute(world: World) -> bool:
    if world.prefill is None or world.prefill.frozen:
        return False
    left = [each for each in world.requests if each.leased_until is None and not each.is_computed]
    return world.prefill.step is not None or bool(left)


WEIGHTS = {
    moves.turn_all: 20,
    moves.turn_one: 20,
    moves.pass_time: 3,
    moves.preempt: 3,
    moves.abort_prefill: 1,
    moves.abort_load: 1,
    moves.stop_or_continue: 2,
    moves.lie_low: 1,
}


def long_prompts(seed: int, verify: float = 0.0, decode_ranks: int | None = None, **fault_rates: Any) -> World:
    """Drives a world with two long prompts at random. Then P mostly ends, and the others are driven home.

    Raises ``AssertionError`` for a broken promise.
    """
    draw = random.Random(seed)
    rates: dict[str, Any] = {"hold_writes": draw.choice([0.0, 0.5]), "delay": draw.choice([0.0, 0.3])}
    mode, ranks, ordered = draw.choice([PushMode.LAYER, PushMode.CHUNK]), draw.choice([1, 2]), draw.random() < 0.7
    faults = Faults.endless(seed, **rates | fault_rates)
    at_once, decode_ranks = draw.choice([1, 4]), decode_ranks or drawn_decode_ranks(seed)
    world = World(faults, seed, ranks, mode, at_once, ordered=ordered, verify=verify, decode_ranks=decode_ranks)
    known = {moved.do: moved.possible for moved in MOVES} | {compute: may_compute}
    weights = WEIGHTS | {compute: 40}
    if verify:
        weights[moves.damage] = 3
    try:
        assert world.prefill is not None
        for name in "ab":
            prompt = Prompt(name, f"prompt {name}", TOKENS)
            world.prompts.append(prompt)
            world.prefill.accept(prompt)
            world.decoders[0].load(prompt, None, draw.choice([0, 1]))
        for _ in range(3):
            world.turn()
        for _ in range(draw.randrange(20, 80)):
            possible = [do for do in weights if known[do](world)]
            [do] = draw.choices(possible, [weights[do] for do in possible])
            do(world, draw.choice)
            world.check()
        if "P" in world.engines and draw.random() < PART_THAT_ENDS:
            world.kill("P", lingers=draw.choice([0, 3]))
        world.drive_home()
    finally:
        world.close()
    return world
