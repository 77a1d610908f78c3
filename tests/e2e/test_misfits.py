"""Engines between which no push can be right: only the request fails, at once and with the reason."""

import pytest

from tests.e2e import engines
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import LAYERWISE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, prompt, send

SOON_S = 5.0
BUSY_S = 10.0
"""Additional seconds for a busy machine."""
LARGE_BLOCKS = (("block_size", 64),)
P_LARGE = EngineSpec("P-large", "P", transfer(LAYERWISE), LARGE_BLOCKS)
D_LARGE = EngineSpec("D-large", "D", transfer(LAYERWISE, on_failed_load="recompute"), LARGE_BLOCKS)
D_RECOMPUTE = EngineSpec("D-recomputes", "D", transfer(LAYERWISE, on_failed_load="recompute"))


@pytest.mark.parametrize("order", ["together", "late"])
@pytest.mark.parametrize(
    ("p_spec", "d_spec", "sizes"),
    [(P_LARGE, D_RECOMPUTE, "64 tokens, ours 32"), (engines.P_LAYER, D_LARGE, "32 tokens, ours 64")],
    ids=["64-to-32", "32-to-64"],
)
def test_unequal_block_sizes(
    fleet: Fleet, reference: Reference, p_spec: EngineSpec, d_spec: EngineSpec, sizes: str, order: Order
) -> None:
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
