"""Blocks that go through staging memory: tokens and KV bytes are right, and checks notice damage on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.e2e import engines, stagingfaults
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, prompt, send
from tests.e2e.pushtrace import Push
from tests.e2e.stagingfaults import Copying
from tests.e2e.streamchecks import check_completed

PLANS = {"gather": "gathered", "packed": "packed"}


def prefill(packing: str) -> EngineSpec:
    return EngineSpec(f"P-{packing}", "P", transfer(LAYERWISE, packing=packing, granularity="layer", trace_dir=TRACE))


@pytest.mark.parametrize("order", ["early", "late", "together"])
@pytest.mark.parametrize("packing", ["gather", "packed"])
def test_tokens_and_bytes_are_right(fleet: Fleet, reference: Reference, packing: str, order: Order) -> None:
    p, d = fleet.get(prefill(packing), engines.D_LAYER)
    for length in (1, 33, 513, 1500):
        handoff = send(p, d, prompt(length, seed=70), order)
        check(handoff.outcome(), reference)
        push = handoff.push()
        check_completed(push, length)
        if order == "early":
            assert plans(push) == {PLANS[packing]}
        elif order == "late":  # pushed whole, by upstream's code
            assert plans(push) == {"direct"}


@pytest.mark.parametrize(("packing", "plan"), [("gather", "gathered"), ("packed", "direct")])
def test_a_stock_d_does_not_unpack(fleet: Fleet, reference: Reference, packing: str, plan: str) -> None:
    p, d = fleet.get(prefill(packing), engines.D_STOCK)
    handoff = send(p, d, prompt(513, seed=72), "early")
    check(handoff.outcome(), reference)
    assert plans(handoff.push()) == {plan}


@pytest.mark.parametrize(
    ("packing", "copying"), [("gather", "gather"), ("packed", "gather"), ("packed", "scatter")], ids=str
)
def test_a_damaged_block_is_seen(fleet: Fleet, reference: Reference, packing: str, copying: Copying) -> None:
    """One block in P's ring, or in D's, is one wrong block of one layer on D, and other tokens."""
    p, d = fleet.get(prefill(packing), engines.D_LAYER)
    spoiled = p if copying == "gather" else d
    with damaged(spoiled, copying, number=1):
        handoff = send(p, d, prompt(700, seed=71), "early", max_tokens=24)
        outcome = handoff.outcome()
    assert plans(handoff.push()) == {PLANS[packing]}
    assert len(handoff.differing_cells()) == 1
    assert outcome.d_tokens != reference.tokens(handoff.token_ids, 24)
    with pytest.raises(AssertionError, match="KV differs"):
        check(outcome, reference)
    check(send(p, d, handoff.token_ids, "early").outcome(), reference)


def plans(push: Push) -> set[str]:
    """The plans of all WRITEs of a push."""
    return {write["plan"] for write in push.writes}


@contextlib.contextmanager
def damaged(host: EngineHost, copying: Copying, number: int) -> Iterator[None]:
    host.call(stagingfaults.damage, copying, number)
    try:
        yield
    finally:
        host.call(stagingfaults.reset)
