"""Full caches: P and each D have room for one prompt, and routers send the prompts to them in different orders."""

from __future__ import annotations

import random
from typing import Any

from tests.support.fake_transport import Faults
from tests.unit.both_sides.process import Prompt
from tests.unit.both_sides.storm import ROOM, drawn_decode_ranks
from tests.unit.both_sides.world import DECODERS, World

STEP_S = 0.1


def full_caches(
    seed: int, limit_s: float, prompts: int = 6, decoders: int = 2, decode_ranks: int | None = None, **fault_rates: Any
) -> World:
    """Every prompt goes to P and to one D, each in an order of its own. Returns the world when all have ended.

    P computes in the order of its queue, as vLLM does. ``fault_rates`` by kind. Raises ``AssertionError`` if a prompt
    takes ``limit_s`` seconds, and for a broken promise.
    """
    draw = random.Random(seed)
    faults, ranks = Faults.endless(seed, **fault_rates), draw.choice([1, 2])
    world = World(faults, seed, ranks, blocks=ROOM, decode_ranks=decode_ranks or drawn_decode_ranks(seed))
    asked = [Prompt(f"r{number}", f"prompt {number}", draw.choice([16, 17, 20])) for number in range(prompts)]
    world.mistaken = 0.0
    try:
        prefill, began = world.prefill, world.now
        assert prefill is not None
        for prompt in asked:
            prefill.accept(prompt)
        engines = dict(zip(DECODERS[:decoders], world.decoders, strict=False))
        for prompt in draw.sample(asked, prompts) if prompts > 2 else reversed(asked):
            engines[draw.choice(list(engines))].load(prompt, None, 0, first=prompts > 2 and draw.random() < 0.3)
        while world.is_busy or world.has_prompts:
            world.compute_first()
            for process in draw.sample(world.running, len(world.running)):
                process.turn()
            prefill.reap_leases()
            world.check()
            world.now += STEP_S
            assert world.now - began < limit_s or not world.has_prompts, (
                f"not over after {limit_s:g} s: {world.outcomes}"
            )
        for engine in world.engines.values():
            engine.assert_idle()
    finally:
        world.close()
    return world
