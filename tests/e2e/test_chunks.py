"""Chunks that do not end where blocks end, and engines with other block sizes."""

import math

import pytest

from tests.e2e import engines
from tests.e2e.enginespec import LAYERWISE, STOCK, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, prompt, send
from tests.e2e.streamchecks import check_completed

TOKENS_PER_STEP = 90


@pytest.mark.parametrize("order", ["early", "late", "together"])
def test_chunks_that_end_inside_a_block(fleet: Fleet, reference: Reference, order: Order) -> None:
    """An unfinished block waits for the chunk that fills it. A chunk may complete no block at all."""
    p, d = fleet.get(engines.P_UNALIGNED, engines.D_LAYER)
    for length in (89, 90, 91, 96, 97, 180, 181, 192, 193, 270, 901):
        handoff = send(p, d, prompt(length, seed=80), order)
        check(handoff.outcome(), reference)
        check_completed(handoff.push(), length, chunks=math.ceil(length / TOKENS_PER_STEP))


@pytest.mark.parametrize(
    ("block_size", "stock_d"),
    [
        (64, False),
        (128, True),
        pytest.param(64, True, marks=pytest.mark.exhaustive),
        pytest.param(128, False, marks=pytest.mark.exhaustive),
    ],
)
def test_other_block_sizes(fleet: Fleet, reference: Reference, block_size: int, stock_d: bool) -> None:
    options = (("block_size", block_size),)
    connector = transfer(STOCK) if stock_d else transfer(LAYERWISE)
    p, d = fleet.get(
        EngineSpec(f"P-{block_size}", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), options),
        EngineSpec(f"D-{block_size}", "D", connector, options),
    )
    for length in (1, block_size - 1, block_size, block_size + 1, 700):
        handoff = send(p, d, prompt(length, seed=81), "early")
        check(handoff.outcome(), reference)
        assert handoff.push().swept_layers == 0
