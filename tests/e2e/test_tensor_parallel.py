"""Unequal tensor parallelism: each P rank writes its share, D counts one completion per P rank. Checks tokens only."""

from dataclasses import replace

import pytest

from layerpush.core.replica import STRIPE
from tests.e2e import engines
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginemetrics import scrape, value, wait_for
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check_tokens, prompt, send, started_on_p
from tests.e2e.models import SHAPE
from tests.e2e.pushtrace import wait_for_pushes
from tests.metrics_scrape import Scrape

TWO_RANKS = (("tensor_parallel_size", 2),)
BOTH_TWO = EngineSpec(
    "B-tp2", "P", transfer(LAYERWISE, kv_role="kv_both", granularity="layer", trace_dir=TRACE), TWO_RANKS
)
"""P of the one pair, and D of the other."""
P_TWO = EngineSpec("P-tp2", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), TWO_RANKS)
CASES: tuple[tuple[int, Order], ...] = (
    (1, "together"),
    (33, "late"),
    (257, "together"),
    (700, "late"),
    (1300, "together"),
)
BLOCK = 32
BLOCK_BYTES = 2 * BLOCK * SHAPE.layers * SHAPE.head_dim * 4
"""One block of all layers of the model with one KV head: K and V, in float32."""
D_TWO = EngineSpec("D-tp2", "D", transfer(LAYERWISE), TWO_RANKS)


@pytest.mark.parametrize(
    ("p_spec", "d_spec"),
    [
        (BOTH_TWO, engines.D_LAYER),
        (engines.P_LAYER, BOTH_TWO),
        pytest.param(P_TWO, D_TWO, marks=pytest.mark.exhaustive),
    ],
    ids=["2-to-1", "1-to-2", "2-to-2"],
)
def test_unequal_ranks(fleet: Fleet, reference: Reference, p_spec: EngineSpec, d_spec: EngineSpec) -> None:
    p, d = fleet.get(p_spec, d_spec)
    before, written = {host: scrape(host) for host in (p, d)}, 0
    for length, order in CASES:
        handoff = send(p, d, prompt(length, seed=100), order)
        check_tokens(handoff.outcome(), reference)
        pushes = wait_for_pushes(p.trace_dir, handoff.request_id, p_spec.ranks)
        assert {push.rank for push in pushes} == set(range(p_spec.ranks))
        written += sum(write["bytes"] for push in pushes for write in push.writes)
        for push in pushes:
            assert (push.outcome, push.swept_layers) == ("completed", 0)
            assert {write["remote_rank"] for write in push.writes} == targets(push.rank, p_spec.ranks, d_spec.ranks)
            if order == "together" and length > 1000:
                assert push.mode == "layer"
    if d_spec.ranks == 2:
        assert started_on_p(d), "no answer has started with P's token"
    check_counted_once(p, d, before, written)


def check_counted_once(p: EngineHost, d: EngineHost, before: dict[EngineHost, Scrape], written: int) -> None:
    """All ranks count a push, or a load, once."""
    for host, name in (
        (p, "pushes_total"),
        (p, "exposed_seconds_count"),
        (d, "loads_total"),
        (d, "load_seconds_count"),
    ):
        wait_for(host, name, before[host].value(name) + len(CASES))
    for outcome in ("failed", "unclaimed", "cancelled"):
        assert value(p, "pushes_total", outcome=outcome) == before[p].value("pushes_total", outcome=outcome)
    assert value(d, "loads_total", outcome="failed") == before[d].value("loads_total", outcome="failed")
    assert value(p, "write_bytes_sum") == before[p].value("write_bytes_sum") + written
    assert (value(p, "ranks"), value(d, "ranks")) == (p.spec.ranks, d.spec.ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2)])
def test_unequal_ranks_with_states(fleet: Fleet, p_ranks: int, d_ranks: int) -> None:
    """Mamba-2 with one group: the ranks split its states, except B and C of the convolution."""
    model = "GraniteMoeHybridForCausalLM"
    p, d, plain = fleet.get(
        replace(P_TWO, name=f"P-states-{p_ranks}", options=(("tensor_parallel_size", p_ranks),), model=model),
        replace(D_TWO, name=f"D-states-{d_ranks}", options=(("tensor_parallel_size", d_ranks),), model=model),
        EngineSpec("R-states", "R", None, model=model),
    )
    reference = Reference(plain)
    for length, order in CASES:
        handoff = send(p, d, prompt(length, seed=100), order)
        assert handoff.outcome().d_tokens == reference.tokens(handoff.token_ids)  # P leaves the last token to D
        pushes = wait_for_pushes(p.trace_dir, handoff.request_id, p_ranks)
        assert {push.outcome for push in pushes} == {"completed"}


@pytest.mark.exhaustive
def test_ranks_with_equal_kv_send_each_block_once(fleet: Fleet) -> None:
    """Both ranks of P hold the model's only KV head."""
    model = "one kv head"
    p, d, plain = fleet.get(
        replace(P_TWO, name="P-tp2-one", model=model),
        replace(engines.D_LAYER, name="D-one", model=model),
        EngineSpec("R-one", "R", None, model=model),
    )
    reference = Reference(plain)
    for length, order in CASES:
        handoff = send(p, d, prompt(length, seed=100), order)
        check_tokens(handoff.outcome(), reference)
        pushes = wait_for_pushes(p.trace_dir, handoff.request_id, 2)
        sent = [sum(write["bytes"] for write in push.writes) for push in pushes]
        blocks = -(-length // BLOCK)
        assert sum(sent) == BLOCK_BYTES * blocks or (order == "late" and blocks <= STRIPE), sent
        assert min(sent) > 0 or blocks <= STRIPE


def targets(rank: int, p_ranks: int, d_ranks: int) -> set[int]:
    """The D ranks that hold KV heads of a P rank."""
    return {d_rank for d_rank in range(d_ranks) if p_ranks != d_ranks or d_rank == rank}
