"""Chunks that do not end where blocks end, and engines with other block sizes."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e import engines
from tests.e2e.enginespec import LAYERWISE, STOCK, TRACE, EngineSpec, Role, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, check_tokens, prompt, send
from tests.e2e.models import SHAPE
from tests.e2e.pushtrace import wait_for_pushes
from tests.e2e.streamchecks import check_completed

TOKENS_PER_STEP = 90
CASES: tuple[tuple[Order, tuple[int, ...]], ...] = (
    ("early", (89, 90, 91, 96, 97, 180, 181, 192, 193, 270, 901)),
    ("late", (91, 193, 901)),
    ("together", (97, 270)),
)
TOKEN_BYTES = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4
"""The KV of one token: K and V, in float32."""


def with_blocks(size: int, role: Role, connector: str = LAYERWISE) -> EngineSpec:
    """An engine with blocks of this size. D computes a prompt itself whose load failed."""
    more: dict[str, Any] = (
        {"granularity": "layer", "trace_dir": TRACE} if role == "P" else {"on_failed_load": "recompute"}
    )
    return EngineSpec(f"{role}-{size}-{connector[:4]}", role, transfer(connector, **more), (("block_size", size),))


@pytest.mark.exhaustive
def test_chunks_that_end_inside_a_block(fleet: Fleet, reference: Reference) -> None:
    """An unfinished block waits for the chunk that fills it. A chunk may complete no block at all."""
    p, d = fleet.get(engines.P_UNALIGNED, engines.D_LAYER)
    for order, lengths in CASES:
        for length in lengths:
            handoff = send(p, d, prompt(length, seed=80), order)
            check(handoff.outcome(), reference)
            check_completed(handoff.push(), length, chunks=math.ceil(length / TOKENS_PER_STEP))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stock_d", [False, True])
@pytest.mark.parametrize("block_size", [64, 128])
def test_other_block_sizes(fleet: Fleet, reference: Reference, block_size: int, stock_d: bool) -> None:
    p, d = fleet.get(with_blocks(block_size, "P"), with_blocks(block_size, "D", STOCK if stock_d else LAYERWISE))
    for length in (1, block_size - 1, block_size, block_size + 1, 700):
        handoff = send(p, d, prompt(length, seed=81), "early")
        check(handoff.outcome(), reference)
        assert handoff.push().swept_layers == 0


def with_ranks(spec: EngineSpec) -> EngineSpec:
    """The engine with two tensor parallel ranks."""
    return replace(spec, name=f"{spec.name}-tp2", options=(*spec.options, ("tensor_parallel_size", 2)))


@pytest.mark.parametrize(
    ("p_spec", "d_spec"),
    [
        (with_blocks(64, "P"), engines.D_LAYER),
        *(
            pytest.param(*pair, marks=pytest.mark.exhaustive)
            for pair in (
                (engines.P_LAYER, with_blocks(64, "D")),
                (engines.P_LAYER, with_blocks(128, "D")),
                (with_ranks(with_blocks(64, "P")), engines.D_LAYER),
                (with_ranks(engines.P_LAYER), with_blocks(64, "D")),
                (with_blocks(64, "P"), with_ranks(engines.D_LAYER)),
                (engines.P_LAYER, with_ranks(with_blocks(64, "D"))),
            )
        ),
    ],
    ids=lambda spec: spec.name,
)
def test_unequal_block_sizes(fleet: Fleet, reference: Reference, p_spec: EngineSpec, d_spec: EngineSpec) -> None:
    """Tokens, and the bytes that P sends: a D that computes the prompt itself would have the same tokens."""
    p, d = fleet.get(p_spec, d_spec)
    cases: tuple[tuple[int, Order], ...] = (
        (1, "together"),
        (33, "late"),
        (300, "together"),
        (700, "late"),
        (1100, "together"),
    )
    for length, order in cases:
        handoff = send(p, d, prompt(length, seed=82), order)
        check_tokens(handoff.outcome(), reference)
        pushes = wait_for_pushes(p.trace_dir, handoff.request_id, p_spec.ranks)
        assert {push.outcome for push in pushes} == {"completed"}
        assert {push.mode for push in pushes} == {"request" if order == "late" else "layer"} or order == "together"
        written = sum(write["bytes"] for push in pushes for write in push.writes)
        assert written == 32 * TOKEN_BYTES * -(-length // 32)
