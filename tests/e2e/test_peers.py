"""Kinds of peers: a stock engine on either side, MultiConnector, several decode engines."""

import pytest

from tests.e2e import engines, probes
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, introduce, prompt, send, started_on_p
from tests.e2e.models import LAYERS
from tests.e2e.streamchecks import check_completed, check_streamed

LENGTHS = (1, 33, 256, 257, 1100)


@pytest.mark.parametrize("order", ["early", "mid", "late", "together"])
def test_layerwise_p_and_stock_d(fleet: Fleet, reference: Reference, order: Order) -> None:
    p, d = fleet.get(engines.P_LAYER, engines.D_STOCK)
    for length in LENGTHS if order != "mid" else (900, 1100):
        handoff = send(p, d, prompt(length, seed=10), order)
        check(handoff.outcome(), reference)
        check_completed(handoff.push(), length)
        if order == "early" and length > 1000:
            check_streamed(handoff)


@pytest.mark.parametrize("order", ["early", "late", "together"])
def test_stock_p_and_layerwise_d(fleet: Fleet, reference: Reference, order: Order) -> None:
    p, d = fleet.get(engines.P_STOCK, engines.D_LAYER)
    for length in LENGTHS:
        check(send(p, d, prompt(length, seed=11), order).outcome(), reference)


@pytest.mark.parametrize(
    ("p_spec", "d_spec"),
    [(engines.P_MULTI, engines.D_LAYER), (engines.P_LAYER, engines.D_MULTI), (engines.P_MULTI, engines.D_MULTI)],
    ids=["P", "D", "both"],
)
@pytest.mark.parametrize("order", ["early", "late"])
def test_under_multi_connector(
    fleet: Fleet, reference: Reference, p_spec: EngineSpec, d_spec: EngineSpec, order: Order
) -> None:
    p, d = fleet.get(p_spec, d_spec)
    wrapped = p if p_spec == engines.P_MULTI else d
    assert wrapped.call(probes.connector_class) == "MultiConnector"
    for length in LENGTHS:
        handoff = send(p, d, prompt(length, seed=12), order)
        check(handoff.outcome(), reference)
        check_completed(handoff.push(), length)
        if order == "early" and length > 1000:
            check_streamed(handoff)
    if order == "late" and d_spec == engines.D_MULTI:
        assert started_on_p(d), "no answer has started with P's token"


def test_under_multi_connector_beside_a_store(fleet: Fleet, reference: Reference) -> None:
    """P loads a repeated prompt from the store, and computes its last tokens: little is left to overlap."""
    p, d = fleet.get(engines.P_STORE, engines.D_NO_GROUPS)
    introduce(p, d)
    shared = prompt(512, seed=14)
    first, second = (shared + prompt(length, seed=14) for length in (600, 700))
    for token_ids in (first, second, first):
        handoff = send(p, d, token_ids, "early")
        check(handoff.outcome(), reference)
        push = handoff.push()
        assert (push.outcome, push.fallback) == ("completed", None)
        assert (push.hooked_layers, push.swept_layers) == (LAYERS, 0)
    assert p.log().count("External Cache Hit!") == 1


def test_one_p_serves_three_decode_engines(fleet: Fleet, reference: Reference) -> None:
    """Requests for three D engines, a stock one among them, are in P at the same time."""
    p, *decoders = fleet.get(engines.P_LAYER, engines.D_LAYER, engines.D_STOCK, engines.D_CACHING)
    handoffs = [send(p, decoders[number % 3], prompt(200 + 211 * number, seed=13), "together") for number in range(9)]
    for handoff in handoffs:
        check(handoff.outcome(), reference)
        assert handoff.push().decode_engine_id == handoff.d.engine_id
