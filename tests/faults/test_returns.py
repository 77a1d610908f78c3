"""Faults while D returns a turn: P computes the prompt, and gives no block away that D may still write."""

import pytest

from tests.e2e import probes, wirefaults
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import LAYERWISE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, introduce, prompt
from tests.e2e.turns import TURNS, Turn, begin_turn, shared_tokens, take_turn
from tests.faults import engines
from tests.faults.checks import LogView, all_along, check_idle_soon, check_owned

P = EngineSpec("P-turns-faults", "P", transfer(LAYERWISE, peer_timeout_s=engines.PEER_TIMEOUT_S, **TURNS))
D = EngineSpec(
    "D-turns-faults",
    "D",
    transfer(LAYERWISE, on_failed_load="recompute", peer_timeout_s=engines.PEER_TIMEOUT_S, **TURNS),
)


def answered(fleet: Fleet, seed: int) -> tuple[EngineHost, EngineHost, EngineHost, Turn]:
    """P, a D of this test's own that keeps a turn, another D, and the turn."""
    p, other = fleet.get(P, engines.D)
    (d,) = fleet.spawn(D)
    introduce(p, d)
    d.call(probes.end_kept_turns)
    return p, d, other, take_turn(p, d, prompt(300, seed=seed))


def check_computed(handoff: Handoff, reference: Reference, p: EngineHost, tokens: int) -> None:
    """Check that the answers are right, and that P was given so many tokens of the prompt."""
    assert handoff.d.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids, 4)
    assert p.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids, 4)[:1]
    assert p.call(probes.scheduled_tokens, handoff.request_id) == tokens


def held(p: EngineHost, d: EngineHost, other: EngineHost, first: Turn, seed: int) -> tuple[Handoff, list[int]]:
    """The next turn goes to P and to another D, and D's WRITE is on the wire. Returns P's blocks under it, too."""
    p.call(wirefaults.watch)
    d.call(wirefaults.on_posts, "hold")
    handoff = begin_turn(p, other, first.text + prompt(100, seed=seed), first.params, max_tokens=4)
    d.poll_until(wirefaults.held_posts)
    blocks = p.call(wirefaults.registered_blocks, handoff.request_id)
    assert len(blocks) == shared_tokens(first) // 32
    check_owned(p, blocks)
    return handoff, blocks


@pytest.mark.exhaustive
def test_d_is_killed_before_it_returns_a_turn(fleet: Fleet, reference: Reference, log: LogView) -> None:
    p, d, other, first = answered(fleet, seed=600)
    d.kill()
    handoff = begin_turn(p, other, first.text + prompt(100, seed=601), first.params, max_tokens=4)
    check_computed(handoff, reference, p, len(handoff.token_ids))
    log.check_one(p, handoff.request_id, "KV load of .* failed")


@pytest.mark.exhaustive
def test_d_is_stopped_while_it_returns_a_turn(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """P parks the blocks, and computes the prompt in others. D's WRITE lands later."""
    p, d, other, first = answered(fleet, seed=602)
    handoff, blocks = held(p, d, other, first, seed=603)
    d.pause()
    check_computed(handoff, reference, p, len(handoff.token_ids))
    log.check_one(p, handoff.request_id, "its blocks are parked")
    check_owned(p, blocks)
    d.resume()
    d.call(wirefaults.lift)
    check_idle_soon(p)
    d.call(probes.end_kept_turns)


@pytest.mark.exhaustive
def test_p_leaves_while_d_returns_a_turn(fleet: Fleet, reference: Reference) -> None:
    p, d, other, first = answered(fleet, seed=604)
    handoff, blocks = held(p, d, other, first, seed=605)
    p.abort(handoff.request_id)
    all_along(lambda: p.call(probes.owned_blocks, blocks) == len(blocks), 1.0, "P keeps the blocks")
    d.call(wirefaults.lift)
    check_idle_soon(p)
    assert other.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids, 4)
    d.call(probes.end_kept_turns)


@pytest.mark.exhaustive
def test_the_time_of_a_turn_ends_while_d_returns_it(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """D keeps the blocks until its WRITE has ended, and P loads the turn."""
    p, d, other, first = answered(fleet, seed=606)
    handoff, _ = held(p, d, other, first, seed=607)
    (kept,) = first.params["remote_block_ids"]
    d.call(probes.release_turns)
    all_along(lambda: d.call(probes.owned_blocks, kept) == len(kept), 1.0, "D keeps the blocks")
    d.call(wirefaults.lift)
    check_computed(handoff, reference, p, len(handoff.token_ids) - shared_tokens(first))
    check_idle_soon(d)
    assert log.serious(d, "Releasing expired") == []


@pytest.mark.exhaustive
def test_d_pauses_for_new_weights_while_it_returns_a_turn(fleet: Fleet, reference: Reference) -> None:
    """D's cache is reset at once, and D keeps the blocks until its WRITE has ended."""
    p, d, other, first = answered(fleet, seed=608)
    handoff, _ = held(p, d, other, first, seed=609)
    (kept,) = first.params["remote_block_ids"]
    d.call(probes.pause_generation)
    all_along(lambda: d.call(probes.owned_blocks, kept) == len(kept), 1.0, "D keeps the blocks")
    d.call(wirefaults.lift)
    d.call(probes.resume_generation)
    check_computed(handoff, reference, p, len(handoff.token_ids) - shared_tokens(first))
    check_idle_soon(d)
