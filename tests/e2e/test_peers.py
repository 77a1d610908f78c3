"""Kinds of peers: a stock engine on either side, MultiConnector, several decode engines."""

import pytest

from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Order, Reference, check, introduce, new_id, prompt, send, started_on_p
from tests.e2e.models import LAYERS
from tests.e2e.streamchecks import check_completed, check_streamed

CASES: tuple[tuple[int, Order], ...] = (
    (1, "late"), (33, "early"), (256, "late"), (257, "early"), (900, "together"), (1100, "early"), (1100, "late"),
)  # fmt: skip


def check_pushes(p: EngineHost, d: EngineHost, reference: Reference, cases: tuple[tuple[int, Order], ...]) -> None:
    for seed, (length, order) in enumerate(cases):  # a prompt is in no cache
        handoff = send(p, d, prompt(length, seed=1000 + seed), order)
        check(handoff.outcome(), reference)
        check_completed(handoff.push(), length)
        if order == "early" and length > 1000:
            check_streamed(handoff)


def test_layerwise_p_and_stock_d(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_LAYER, engines.D_STOCK)
    check_pushes(p, d, reference, ((900, "mid"), *CASES))


def test_stock_p_and_layerwise_d(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_STOCK, engines.D_LAYER)
    for length, order in CASES:
        check(send(p, d, prompt(length, seed=11), order).outcome(), reference)


def test_under_multi_connector(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_BEHIND_STORE, engines.D_BEHIND_STORE)
    for host in (p, d):
        assert host.call(probes.connector_class) == "MultiConnector"
    with pytest.raises(AssertionError, match=r"VLLMValidationError: kv_transfer_params: .* is missing"):
        d.add(Handoff(new_id(), prompt(33, seed=12), p, d).to_d({"do_remote_prefill": True}))
    for host in (p, d):
        host.call(probes.reset_prefix_cache)
    check_pushes(p, d, reference, CASES)
    assert started_on_p(d), "no answer has started with P's token"


@pytest.mark.exhaustive
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
    handoffs = [send(p, decoders[number % 3], prompt(200 + 211 * number, seed=13), "together") for number in range(6)]
    for handoff in handoffs:
        check(handoff.outcome(), reference)
        assert handoff.push().decode_engine_id == handoff.d.engine_id
