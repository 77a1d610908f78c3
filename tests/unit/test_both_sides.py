"""Both engines against each other, through a network that drops, delays, duplicates and reorders, and through deaths.
It keeps a notification behind the WRITEs that ended before it, as UCX does, or it does not.

`tests.unit.both_sides` plays vLLM, NIXL and fate around the real sessions, registrations, loads and writers. After
every step:

- no WRITE is posted for, lands in or is on its way into blocks that the decode engine gave away;
- no WRITE is posted from blocks that the prefill engine gave away, and no gather reads them;
- bytes of staging memory are given back only when no copy and no WRITE uses them;
- a request is completed at most once, by every rank once, and only over the right bytes, even if the decode engine
  has damaged them meanwhile, where they are compared;
- the end of each load and of each push is reported once;
- a load that asked for P's first token, and no other, is reported with the token or with the reason for its absence:
  the token belongs to the load's own prompt, sampled with its own parameters.

D has one rank or two. Of two, the second connects later and works more slowly.

When faults stop, both sides end: nothing is left in a table or on the wire, and no block is held.

`MUTANTS` shows that this can fail: each removes one guard, and each is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from layerpush.core import replica
from layerpush.engine.scheduler.postponed_loads import PostponedLoads
from layerpush.prefill.claims import Claims
from tests.unit.both_sides import (  # each adds mutants of its own
    decode,
    decode_rank,
    full_mutants,
    network_mutants,  # noqa: F401
    packing_mutants,  # noqa: F401
    prefix_mutants,
    rank_mutants,
    verify_mutants,
)
from tests.unit.both_sides.full import full_caches
from tests.unit.both_sides.long import long_prompts
from tests.unit.both_sides.mutants import MUTANTS, Mutant
from tests.unit.both_sides.prefill import LEASE_S
from tests.unit.both_sides.process import Turn
from tests.unit.both_sides.storm import storm
from tests.unit.both_sides.world import HOME_S, World

STORMS = 25
"""Of each test. A test of more storms could take too long on a busy machine."""
MUTANT_STORMS = 300
"""Twice as many as the most elusive mutant needs."""


def half(parts: int) -> list[Any]:
    """Parts of a test. `make test-all` runs the second half of them, too."""
    return [pytest.param(part, marks=pytest.mark.exhaustive if 2 * part >= parts else ()) for part in range(parts)]


def storms(part: int, count: int = STORMS) -> range:
    """The seeds of one part of a test."""
    return range(part * count, (part + 1) * count)


def ended(worlds: Iterable[World]) -> Totals:
    """All worlds together, each driven home."""
    totals = Totals()
    for world in worlds:
        totals.outcomes.update(world.outcomes)
        totals.tokens.update(world.tokens)
        totals.plans.update(world.plans)
        totals.rewinds += world.rewinds
        totals.returned += world.returned
    assert totals.outcomes["loaded"] > STORMS // 2, "too few loads complete to prove anything"
    return totals


@dataclass
class Totals:
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    rewinds: int = 0
    returned: int = 0


@pytest.mark.parametrize("part", range(4))
def test_storms_end_well(part: int) -> None:
    totals = ended(storm(seed) for seed in storms(part))
    assert totals.outcomes["failed"] > STORMS
    assert totals.rewinds
    assert totals.tokens["token"] > STORMS // 4, totals.tokens
    assert all(totals.tokens[missing] for missing in ("late", "other_sampling")), totals.tokens


@pytest.mark.parametrize("part", half(4))
@pytest.mark.parametrize("plan", [None, "mixed"])
def test_storms_on_an_unordered_network_end_well(plan: str | None, part: int) -> None:
    """Bytes land after the end of their WRITE, and other notifications overtake them."""
    packing = None if plan is None else {"plan": plan}
    plans = ended(storm(seed, ordered=False, packing=packing) for seed in storms(part)).plans
    assert plans["direct" if plan is None else "gathered"] > STORMS // 4, plans
    assert plans["whole"], plans


@pytest.mark.parametrize("part", half(4))
@pytest.mark.parametrize("plan", ["gather", "mixed"])
def test_storms_over_staging_memory_end_well(plan: str, part: int) -> None:
    plans = ended(storm(seed, packing={"plan": plan}) for seed in storms(part)).plans
    wanted = {"gather": ["gathered"], "mixed": ["direct", "gathered"]}[plan]
    assert all(plans[each] > STORMS // 4 for each in wanted), plans


@pytest.mark.parametrize("kind", [{}, {"ordered": False}, {"equal_kv": True}], ids=str)
def test_storms_with_kept_turns_end_well(kind: dict[str, Any]) -> None:
    """A kept turn is pushed to whoever names it and has its first tokens, and to nobody else."""
    totals = ended(storm(seed, turns=True, **kind) for seed in storms(0, 2 * STORMS))
    assert totals.returned > STORMS // 4


def test_nobody_waits_for_a_kept_turn() -> None:
    """The writer need not ask for messages every millisecond, and no metric calls the turn unclaimed."""
    world = World(turns=True)
    try:
        assert world.prefill is not None
        world.prefill.keep(Turn("a", "turn", 8))
        world.turn()
        writer = world.prefill.ranks[0].writer
        assert len(writer) == 1
        assert not writer.awaiting
        assert writer.waiting() == writer.computed() == []
        assert writer.is_waiting(world.turns[0][0])
    finally:
        world.close()


@pytest.mark.parametrize("stripe", [1, replica.STRIPE])
def test_storms_between_ranks_with_equal_kv_end_well(stripe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of P's two ranks sends its own blocks, by layer or in a whole push. The decode engine gets all of them."""
    monkeypatch.setattr(replica, "STRIPE", stripe)
    plans = ended(storm(seed, equal_kv=True) for seed in storms(0)).plans
    assert plans["direct"] > STORMS // 4
    assert plans["whole"]


def test_a_block_that_no_rank_sends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "STRIPE", 1)
    monkeypatch.setattr(replica.Replica, "owns", lambda self, block: block % self.count == self.index == 0)
    with pytest.raises(AssertionError, match="bytes"):
        ended(storm(seed, equal_kv=True) for seed in storms(0))


def test_pushes_go_directly_if_staging_memory_is_full() -> None:
    plans = ended(storm(seed, packing={"plan": "gather", "blocks": 0}) for seed in storms(0)).plans
    assert plans["direct"] > STORMS // 4
    assert not plans["gathered"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # a mutant that nobody notices runs through all storms
@pytest.mark.parametrize("mutant", MUTANTS + rank_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_random_events_reveal_a_removed_guard(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.remove(monkeypatch)
    for seed in mutant.seeds(MUTANT_STORMS):
        try:
            storm(seed, **mutant.fault_rates)
        except AssertionError:
            return
    pytest.fail("nobody noticed")


def test_full_caches_give_way_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """P is full of a prompt that D cannot register, and D is full of one that P cannot begin. No prompt is lost."""
    monkeypatch.setattr(decode, "OVERDUE_S", [60.0])
    outcomes = ended(full_caches(seed, limit_s=20.0) for seed in storms(0)).outcomes
    assert outcomes["loaded"] == 6 * STORMS
    assert outcomes["unregistered"] > STORMS
    assert not outcomes["failed"]


@pytest.mark.parametrize("mutant", rank_mutants.FULL_MUTANTS, ids=lambda mutant: mutant.name)
def test_full_caches_of_two_ranks_reveal_a_removed_guard(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard a load ends only when it is overdue, or its request is not registered again."""
    mutant.remove(monkeypatch)
    with pytest.raises(AssertionError, match="not over"):
        full_caches(mutant.seed, limit_s=20.0, **mutant.fault_rates)


def test_a_lease_ends_while_a_registered_prompt_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """D does not give way, as a stock D, and its heartbeats name the prompt that P holds."""
    monkeypatch.setattr(PostponedLoads, "to_unregister", lambda *_: [])
    monkeypatch.setattr(decode, "OVERDUE_S", [480.0])
    outcomes = full_caches(0, LEASE_S + 5.0, prompts=2, decoders=1).outcomes
    assert outcomes == {"loaded": 1, "failed": 1}
    monkeypatch.setattr(Claims, "may_lapse", lambda *_: False)
    with pytest.raises(AssertionError, match="not over"):
        full_caches(0, LEASE_S + 5.0, prompts=2, decoders=1)


@pytest.mark.parametrize("part", range(2))
def test_what_has_landed_of_failed_loads_stays_right(part: int) -> None:
    worlds = [long_prompts(seed) for seed in storms(part, 4 * STORMS)]
    assert sum(world.kept_blocks for world in worlds) > STORMS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", prefix_mutants.MUTANTS + verify_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_long_prompts_reveal_a_removed_guard(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = 1.0 if mutant in verify_mutants.MUTANTS else 0.0
    mutant.remove(monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in mutant.seeds(8 * STORMS):
            long_prompts(seed, verify=verify, **mutant.fault_rates)


@pytest.mark.parametrize("kind", [{}, {"ordered": False}, {"equal_kv": True}, {"packing": {"plan": "mixed"}}], ids=str)
def test_a_load_with_damaged_kv_fails(kind: dict[str, Any]) -> None:
    """And no other load, by its checksums. What vLLM has pushed whole is not compared."""
    worlds = [storm(seed, verify=1.0, drop=0.0, fail_posts=0.0, fail_writes=0.0, **kind) for seed in storms(0)]
    assert sum(world.mismatches for world in worlds)
    ended(worlds)


@pytest.mark.parametrize("mutant", verify_mutants.WRONG_WRITES, ids=lambda mutant: mutant.name)
def test_checksums_alone_reveal_wrong_writes(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The world compares no bytes itself."""
    monkeypatch.setattr(decode_rank.DecodeRank, "holds", lambda *_: True)
    mutant.remove(monkeypatch)
    for seed in mutant.seeds(MUTANT_STORMS):
        try:
            storm(seed, verify=1.0, **mutant.fault_rates)
        except AssertionError as error:
            if "is right: layer" in str(error):
                return
    pytest.fail("nobody noticed")


def test_no_damaged_kv_is_kept() -> None:
    worlds = [long_prompts(seed, verify=1.0) for seed in storms(0, 4 * STORMS)]
    assert sum(world.mismatches for world in worlds)
    assert sum(world.kept_blocks for world in worlds) > STORMS // 2


FULL_STORMS = 10
"""Of each test. One of these takes as long as three others."""
FULL_FAULT_RATES = {"drop": 0.1, "duplicate": 0.3, "reorder": 0.3, "delay": 0.5}


@pytest.mark.parametrize("part", half(5))
def test_full_caches_end_well_in_a_storm(part: int) -> None:
    seeds = storms(part, FULL_STORMS)
    outcomes = ended(full_caches(seed, HOME_S, **FULL_FAULT_RATES) for seed in seeds).outcomes
    assert outcomes["unregistered"] > FULL_STORMS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", full_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_full_caches_reveal_a_removed_guard(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.remove(monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in mutant.seeds(4 * STORMS):
            full_caches(seed, HOME_S, **(FULL_FAULT_RATES | mutant.fault_rates))
