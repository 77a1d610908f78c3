"""Conversations: D keeps an answered turn, and P loads what the next prompt shares with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import probes, wirefaults
from tests.e2e.enginehost import EngineHost
from tests.e2e.engines import PREFIX_CACHING
from tests.e2e.enginespec import BLOCK_SIZE, LAYERWISE, EngineSpec, beside_store, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, check_tokens, introduce, new_id, prompt
from tests.e2e.turns import TURNS, begin_turn, shared_tokens, take_turn

P = EngineSpec("P-turns", "P", transfer(LAYERWISE, granularity="layer", **TURNS), PREFIX_CACHING)
D = EngineSpec("D-turns", "D", transfer(LAYERWISE, **TURNS), PREFIX_CACHING)


@pytest.fixture(autouse=True)
def _turns_end(fleet: Fleet) -> Iterator[None]:
    """The turns that a test leaves would be kept for minutes. vLLM does not take them for KV that nobody fetched."""
    yield
    for host in fleet.in_use():
        if not host.broken:
            host.call(probes.end_kept_turns)
            assert "Releasing expired" not in host.log()[host.log_start :]


@pytest.fixture
def pair(fleet: Fleet) -> list[EngineHost]:
    hosts = fleet.get(P, D)
    introduce(*hosts)
    return hosts


def test_p_computes_only_what_d_does_not_keep(pair: list[EngineHost], reference: Reference) -> None:
    first = take_turn(*pair, prompt(300, seed=140))
    second = take_turn(*pair, first.text + prompt(350, seed=141), first.params)
    third = take_turn(*pair, second.text + prompt(20, seed=142), second.params)
    for turn in (first, second, third):
        check(turn.outcome, reference)
    assert first.computed == 300
    assert second.computed == len(second.outcome.handoff.token_ids) - shared_tokens(first)
    assert third.computed == len(third.outcome.handoff.token_ids) - shared_tokens(second)
    push = second.outcome.handoff.push()
    assert (push.outcome, push.mode) == ("completed", "layer")
    assert push.chunks[0]["cached"], "what P has loaded does not wait for the rest"


def test_the_longest_equal_prefix_is_loaded(pair: list[EngineHost], reference: Reference) -> None:
    """A chat template has dropped a part of the answer."""
    first = take_turn(*pair, prompt(300, seed=143))
    dropped = take_turn(*pair, first.text[:310] + prompt(200, seed=144), first.params)
    check(dropped.outcome, reference)
    assert dropped.computed == 510 - 288
    other = take_turn(*pair, prompt(200, seed=145), dropped.params)
    check(other.outcome, reference)
    assert other.computed == 200


def test_a_turn_is_returned_once(pair: list[EngineHost], reference: Reference) -> None:
    """A conversation that forks costs a computation."""
    first = take_turn(*pair, prompt(200, seed=146))
    for seed, computed in ((147, 100 + 240 - shared_tokens(first)), (148, 100 + 240)):
        fork = take_turn(*pair, first.text + prompt(100, seed=seed), first.params)
        check(fork.outcome, reference)
        assert fork.computed == computed


def test_p_loads_only_what_it_has_not_cached(pair: list[EngineHost], reference: Reference) -> None:
    """D, too, registers only what the turn has not left in its prefix cache."""
    p, d = pair
    first = take_turn(p, d, prompt(300, seed=149), answer=100)
    d.call(wirefaults.watch)
    p.call(wirefaults.watch)
    second = take_turn(p, d, first.text + prompt(100, seed=150), first.params, forgets=False)
    check(second.outcome, reference)
    request_id = second.outcome.handoff.request_id
    assert second.computed == 500 - 384
    assert len(p.call(wirefaults.registered_blocks, request_id)) == 384 // 32 - 300 // 32
    assert len(d.call(wirefaults.registered_blocks, request_id)) == 500 // 32 + 1 - 384 // 32
    p.call(wirefaults.reset)
    d.call(wirefaults.reset)


def test_a_pause_for_new_weights_ends_kept_turns(pair: list[EngineHost], reference: Reference) -> None:
    """At once, although D schedules no request: its KV is that of the old weights."""
    p, d = pair
    first = take_turn(p, d, prompt(300, seed=159))
    (kept,) = first.params["remote_block_ids"]
    d.wait_idle()
    assert d.call(probes.owned_blocks, kept) == len(kept)
    d.call(probes.pause_generation)
    d.wait_idle()
    assert d.call(probes.owned_blocks, kept) == 0
    d.call(probes.resume_generation)
    second = take_turn(p, d, first.text + prompt(100, seed=160), first.params)
    check(second.outcome, reference)
    assert second.computed == 440


@pytest.mark.exhaustive
def test_p_is_preempted_after_it_has_loaded_a_turn(pair: list[EngineHost], reference: Reference) -> None:
    """A turn is returned once, so P computes the whole prompt."""
    p, d = pair
    first = take_turn(p, d, prompt(300, seed=153))
    p.wait_idle()
    p.call(probes.count_scheduled_tokens)
    p.hold()
    handoff = begin_turn(p, d, first.text + prompt(700, seed=154), first.params)
    loaded = shared_tokens(first)
    while p.call(probes.computed_tokens, handoff.request_id) <= loaded:
        p.step()
    assert p.call(probes.preempt_all)
    computed = p.call(probes.scheduled_tokens, handoff.request_id)
    p.run()
    check(handoff.outcome(), reference)
    assert p.call(probes.scheduled_tokens, handoff.request_id) == computed + len(handoff.token_ids)
    push = handoff.push()
    assert (push.outcome, push.epoch) == ("completed", 1)


@pytest.mark.exhaustive
def test_a_lora_adapter(fleet: Fleet) -> None:
    adapter: Any = {"options": (("enable_lora", True),), "model": "lora"}
    p, d, plain = fleet.get(
        EngineSpec("P-turns-lora", "P", transfer(LAYERWISE, **TURNS), **adapter),
        EngineSpec("D-turns-lora", "D", transfer(LAYERWISE, **TURNS), **adapter),
        EngineSpec("R-set", "R", None, **adapter),
    )
    introduce(p, d)
    first = take_turn(p, d, prompt(300, seed=157))
    second = take_turn(p, d, first.text + prompt(100, seed=158), first.params)
    check(second.outcome, Reference(plain))
    assert second.computed == 440 - 320


BOTH = transfer(LAYERWISE, kv_role="kv_both", granularity="layer", **TURNS)
PAIRS = {
    "kv_both": tuple(EngineSpec(f"B{number}-turns", "P", BOTH) for number in range(2)),
    "larger blocks on D": (
        EngineSpec("P-turns-32", "P", transfer(LAYERWISE, **TURNS)),
        EngineSpec("D-turns-64", "D", transfer(LAYERWISE, **TURNS), (("block_size", 64),)),
    ),
    "larger blocks on P": (
        EngineSpec("P-turns-64", "P", transfer(LAYERWISE, **TURNS), (("block_size", 64),)),
        EngineSpec("D-turns-32", "D", transfer(LAYERWISE, **TURNS)),
    ),
    "beside another connector": (
        EngineSpec("P-turns-multi", "P", beside_store(transfer(LAYERWISE, **TURNS), "kv_producer", first=False)),
        EngineSpec("D-turns-multi", "D", beside_store(transfer(LAYERWISE, **TURNS), "kv_consumer", first=False)),
    ),
    "two ranks on D": (
        EngineSpec("P-turns-1", "P", transfer(LAYERWISE, **TURNS)),
        EngineSpec("D-turns-2", "D", transfer(LAYERWISE, **TURNS), (("tensor_parallel_size", 2),)),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PAIRS)
def test_other_engines(fleet: Fleet, reference: Reference, name: str) -> None:
    """The turn of 380 tokens ends at another block of each engine: blocks of the larger size are loaded."""
    p, d = fleet.get(*PAIRS[name])
    size = max(dict(each.options).get("block_size", BLOCK_SIZE) for each in PAIRS[name])
    introduce(p, d)
    first = take_turn(p, d, prompt(340, seed=151))
    second = take_turn(p, d, first.text + prompt(100, seed=152), first.params)
    check_tokens(second.outcome, reference)
    assert second.computed == 480 - 379 // size * size


@pytest.mark.exhaustive
def test_several_answers(fleet: Fleet, reference: Reference) -> None:
    """D keeps none of `n` answers. Of P's `n` requests one loads the turn, and the other computes its prompt."""
    p, d = fleet.get(PAIRS["larger blocks on D"][0], EngineSpec("D-turns-32-n", "D", transfer(LAYERWISE, **TURNS)))
    introduce(p, d)
    first = take_turn(p, d, prompt(300, seed=155))
    p.wait_idle()
    p.call(probes.count_scheduled_tokens)
    handoff = Handoff(new_id(), first.text + prompt(100, seed=156), p, d)
    names = [f"{number}_{handoff.request_id}" for number in range(2)]  # as vLLM's front end names them
    for name in names:
        p.add(dataclasses.replace(handoff.to_p(), request_id=name, kv_transfer_params=first.params))
        d.add(dataclasses.replace(handoff.to_d(), request_id=name))
    for name in names:
        finished = d.wait_output(name)
        assert finished.kv_transfer_params is None
        assert finished.token_ids == reference.tokens(handoff.token_ids, handoff.max_tokens)
        p.wait_output(name)
    assert p.call(probes.all_scheduled_tokens) == 2 * 440 - shared_tokens(first)
