"""D starts its answers with P's token. They are the plain engine's answers."""

import pytest

from layerpush.telemetry.metrics.catalog import FIRST_TOKENS
from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Order, Reference, check, check_tokens, introduce, new_id, prompt, send
from tests.e2e.test_metrics import scrape, wait_for

LENGTHS = (1, 31, 32, 33, 256, 257, 1100)
ANSWER = 200


PATIENCE_S = 2.0


def introduced(fleet: Fleet, p_spec: EngineSpec, d_spec: EngineSpec) -> list[EngineHost]:
    """Both engines, connected. A busy machine makes no token late."""
    p, d = fleet.get(p_spec, d_spec)
    d.call(probes.await_tokens, PATIENCE_S)
    introduce(p, d)
    return [p, d]


def origins(d: EngineHost) -> dict[str, float]:
    """Numbers of this engine's requests by the origin of their first token."""
    found = scrape(d)
    return {origin: found.value("first_tokens_total", origin=origin) for origin in FIRST_TOKENS.values}


def check_origins(d: EngineHost, before: dict[str, float], **more: int) -> None:
    """Since ``before``, so many requests have started with tokens of these origins, and no others."""
    for origin, count in more.items():
        wait_for(d, "first_tokens_total", before[origin] + count, origin=origin)
    assert origins(d) == {origin: count + more.get(origin, 0) for origin, count in before.items()}


@pytest.mark.parametrize("order", ["early", "mid", "after_last_step", "late", "together"])
def test_answers_start_on_p(fleet: Fleet, reference: Reference, order: Order) -> None:
    p, d = introduced(fleet, engines.P_AUTO, engines.D_LAYER)
    before = origins(d)
    lengths = LENGTHS if order != "mid" else (900, 1100)
    for length in lengths:
        check(send(p, d, prompt(length, seed=110), order).outcome(), reference)
    check_origins(d, before, prefill=len(lengths))


def test_d_computes_the_token_of_a_one_token_request(fleet: Fleet, reference: Reference) -> None:
    p, d = introduced(fleet, engines.P_AUTO, engines.D_LAYER)
    before = origins(d)
    check(send(p, d, prompt(300, seed=111), "early", max_tokens=1).outcome(), reference)
    check_origins(d, before, ends=1)


def test_a_stock_p_sends_no_first_token(fleet: Fleet, reference: Reference) -> None:
    p, d = introduced(fleet, engines.P_STOCK, engines.D_LAYER)
    before = origins(d)
    for order in ("early", "late"):
        check(send(p, d, prompt(300, seed=112), order).outcome(), reference)
    check_origins(d, before, not_promised=2)


def test_preempted_after_p_s_token(fleet: Fleet, reference: Reference) -> None:
    """D runs out of blocks while it answers. It computes some answers again, and P's tokens in them."""
    p, d = introduced(fleet, engines.P_AUTO, engines.D_TIGHT)
    before = origins(d)
    handoffs = [Handoff(new_id(), prompt(300 + number, seed=113), p, d, ANSWER) for number in range(3)]
    for handoff in handoffs:
        p.add(handoff.to_p())
        d.add(handoff.to_d())
    d.poll_until(probes.has_preempted)
    for handoff in handoffs:
        check_tokens(handoff.outcome(), reference)
    check_origins(d, before, prefill=3)
