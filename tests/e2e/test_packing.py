"""Blocks that go through staging memory: tokens and KV bytes are those of direct WRITEs."""

from __future__ import annotations

import pytest

from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, prompt, send
from tests.e2e.streamchecks import check_completed

PLANS = {"gather": "gathered", "packed": "packed"}


def prefill(packing: str) -> EngineSpec:
    return EngineSpec(f"P-{packing}", "P", transfer(LAYERWISE, packing=packing, min_write_bytes=0, trace_dir=TRACE))


D_UNPACKING = EngineSpec("D-unpacking", "D", transfer(LAYERWISE))


@pytest.mark.parametrize("order", ["early", "late", "together"])
@pytest.mark.parametrize("packing", ["gather", "packed"])
def test_tokens_and_bytes_are_right(fleet: Fleet, reference: Reference, packing: str, order: Order) -> None:
    p, d = fleet.get(prefill(packing), D_UNPACKING)
    for length in (1, 33, 513, 1500):
        handoff = send(p, d, prompt(length, seed=70), order)
        check(handoff.outcome(), reference)
        push = handoff.push()
        check_completed(push, length)
        if order == "early":  # a late one is pushed whole, by upstream's means
            assert {write["plan"] for write in push.writes} == {PLANS[packing]}
