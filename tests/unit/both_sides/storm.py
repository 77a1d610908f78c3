"""Worlds driven at random: the same seed gives the same course."""

from __future__ import annotations

import random
from typing import Any

from layerpush.core.push_mode import PushMode
from tests.support.fake_transport import Faults
from tests.unit.both_sides.moves import MOVES
from tests.unit.both_sides.process import D_BLOCKS, P_BLOCKS
from tests.unit.both_sides.rings import Packing
from tests.unit.both_sides.world import World

ROOM = 6, 6
"""Blocks of P and of D with room for one long prompt."""
FAULT_RATES = {
    "fail_posts": (0.0, 0.0, 0.05),
    "fail_writes": (0.0, 0.0, 0.05),
    "hold_writes": (0.0, 0.3),
    "drop": (0.0, 0.05, 0.2),
    "duplicate": (0.0, 0.1),
    "reorder": (0.0, 0.1),
    "delay": (0.0, 0.2),
}
"""Rates of faults; a world draws one of each kind."""


def drawn_decode_ranks(seed: int) -> int:
    """The number of each D's ranks. Other draws of a world do not depend on it."""
    return random.Random(f"ranks of D {seed}").choice([1, 2])


def stormy(
    seed: int,
    packing: dict[str, Any] | None = None,
    *,
    ordered: bool = True,
    equal_kv: bool = False,
    verify: float = 0.0,
    turns: bool = False,
    decode_ranks: int | None = None,
    **fault_rates: Any,
) -> World:
    """A world with random faults and packing, except for ``fault_rates`` and ``packing``. With ``equal_kv``, P has two
    ranks that hold the same. ``turns``: see ``World``. ``decode_ranks``: one or two if it is None.
    """
    draw = random.Random(seed)
    if decode_ranks is None:
        decode_ranks = 1 if packing or equal_kv else drawn_decode_ranks(seed)
    fault_rates = {kind: draw.choice(choices) for kind, choices in FAULT_RATES.items()} | fault_rates
    mode, max_in_flight = draw.choices(list(PushMode), (4, 3, 2, 1))[0], draw.choice([1, 2, 4])
    ranks = draw.choice([1, 2])
    packs = Packing.drawn(draw, **packing or {})
    blocks = draw.choice([*3 * [(P_BLOCKS, D_BLOCKS)], ROOM])
    faults = Faults.endless(seed, **fault_rates)
    ranks = 2 if equal_kv else 1 if packing else ranks
    return World(
        faults,
        seed,
        ranks,
        mode,
        max_in_flight,
        packs,
        blocks,
        ordered=ordered,
        equal_kv=equal_kv,
        verify=verify,
        turns=turns,
        decode_ranks=decode_ranks,
    )


def storm(seed: int, moves: int = 120, packing: dict[str, Any] | None = None, **fault_rates: Any) -> World:
    """Drives a world at random, then home. Raises ``AssertionError`` for a broken promise."""
    draw = random.Random(seed)
    world = stormy(seed, packing, **fault_rates)
    try:
        for _ in range(moves):
            possible = [move for move in MOVES if move.possible(world)]
            [move] = draw.choices(possible, [move.weight for move in possible])
            move.do(world, draw.choice)
            world.check()
        world.drive_home()
    finally:
        world.close()
    return world
