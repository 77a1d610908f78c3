"""Blocks that go through staging memory: tokens and KV bytes are right, and checks notice damage on the way."""

from __future__ import annotations

import pytest

from tests.e2e import engines, probes, stagingfaults
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, prompt, send
from tests.e2e.pushtrace import Push
from tests.e2e.streamchecks import check_completed

P = EngineSpec("P-gather", "P", transfer(LAYERWISE, packing="gather", granularity="layer", trace_dir=TRACE))


@pytest.mark.parametrize("order", ["early", "late", "together"])
def test_tokens_and_bytes_are_right(fleet: Fleet, reference: Reference, order: Order) -> None:
    p, d = fleet.get(P, engines.D_LAYER)
    for length in (1, 33, 513, 1500):
        handoff = send(p, d, prompt(length, seed=70), order)
        check(handoff.outcome(), reference)
        push = handoff.push()
        check_completed(push, length)
        if order == "early":
            assert plans(push) == {"gathered"}
        elif order == "late":  # pushed whole, by vLLM's code
            assert plans(push) == {"direct"}


def test_a_stock_d_gets_gathered_writes(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(P, engines.D_STOCK)
    handoff = send(p, d, prompt(513, seed=72), "early")
    check(handoff.outcome(), reference)
    assert plans(handoff.push()) == {"gathered"}


def test_a_damaged_block_is_seen(fleet: Fleet, reference: Reference) -> None:
    """One block in P's ring is one wrong block of one layer on D, and other tokens."""
    p, d = fleet.get(P, engines.D_LAYER)
    p.call(probes.verify, 0.0)
    p.call(stagingfaults.damage, 1)
    try:
        handoff = send(p, d, prompt(700, seed=71), "early", max_tokens=24)
        outcome = handoff.outcome()
    finally:
        p.call(stagingfaults.reset)
        p.call(probes.verify, 1.0)
    assert plans(handoff.push()) == {"gathered"}
    assert len(handoff.differing_cells()) == 1
    assert outcome.d_tokens != reference.tokens(handoff.token_ids, 24)
    with pytest.raises(AssertionError, match="KV differs"):
        check(outcome, reference)
    check(send(p, d, handoff.token_ids, "early").outcome(), reference)


def plans(push: Push) -> set[str]:
    """The plans of all WRITEs of a push."""
    return {write["plan"] for write in push.writes}
