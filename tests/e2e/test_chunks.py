"""Chunks that do not end where blocks end, and engines with other block sizes."""

import math
from typing import Any

import pytest

from tests.e2e import engines
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import LAYERWISE, STOCK, TRACE, EngineSpec, Role, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, prompt, send
from tests.e2e.streamchecks import check_completed

TOKENS_PER_STEP = 90
CASES: tuple[tuple[Order, tuple[int, ...]], ...] = (
    ("early", (89, 90, 91, 96, 97, 180, 181, 192, 193, 270, 901)),
    ("late", (91, 193, 901)),
    ("together", (97, 270)),
)
SOON_S = 5.0
BUSY_S = 10.0
"""Additional seconds for a busy machine."""


def with_blocks(size: int, role: Role, connector: str = LAYERWISE) -> EngineSpec:
    """An engine with blocks of this size. D computes a prompt itself whose load failed."""
    more: dict[str, Any] = (
        {"granularity": "layer", "trace_dir": TRACE} if role == "P" else {"on_failed_load": "recompute"}
    )
    return EngineSpec(f"{role}-{size}-{connector[:4]}", role, transfer(connector, **more), (("block_size", size),))


def test_chunks_that_end_inside_a_block(fleet: Fleet, reference: Reference) -> None:
    """An unfinished block waits for the chunk that fills it. A chunk may complete no block at all."""
    p, d = fleet.get(engines.P_UNALIGNED, engines.D_LAYER)
    for order, lengths in CASES:
        for length in lengths:
            handoff = send(p, d, prompt(length, seed=80), order)
            check(handoff.outcome(), reference)
            check_completed(handoff.push(), length, chunks=math.ceil(length / TOKENS_PER_STEP))


@pytest.mark.parametrize(
    ("block_size", "stock_d"),
    [
        (64, False),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((64, True), (128, False), (128, True))),
    ],
)
def test_other_block_sizes(fleet: Fleet, reference: Reference, block_size: int, stock_d: bool) -> None:
    p, d = fleet.get(with_blocks(block_size, "P"), with_blocks(block_size, "D", STOCK if stock_d else LAYERWISE))
    for length in (1, block_size - 1, block_size, block_size + 1, 700):
        handoff = send(p, d, prompt(length, seed=81), "early")
        check(handoff.outcome(), reference)
        assert handoff.push().swept_layers == 0


@pytest.mark.parametrize("order", ["together", "late"])
@pytest.mark.parametrize(
    ("p_spec", "d_spec", "sizes"),
    [
        (with_blocks(64, "P"), engines.D_RECOMPUTING, "64 tokens, ours 32"),
        (engines.P_LAYER, with_blocks(64, "D"), "32 tokens, ours 64"),
    ],
    ids=["64-to-32", "32-to-64"],
)
def test_unequal_block_sizes(
    fleet: Fleet, reference: Reference, p_spec: EngineSpec, d_spec: EngineSpec, sizes: str, order: Order
) -> None:
    """No push can be right: only the request fails, at once and with the reason."""
    p, d = fleet.get(p_spec, d_spec)
    for seed in (120, 121):  # a second request fails by itself, too
        token_ids = prompt(300, seed=seed)
        expected = reference.tokens(token_ids)
        handoff = send(p, d, token_ids, order)
        assert d.wait_output(handoff.request_id, SOON_S + BUSY_S).token_ids == expected
        assert f"its block size is {sizes}" in said_of(d, handoff.request_id)
        p.wait_output(handoff.request_id)


def said_of(host: EngineHost, request_id: str) -> str:
    return "\n".join(line for line in host.log().splitlines() if request_id in line)
