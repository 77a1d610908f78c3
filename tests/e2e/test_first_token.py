"""D starts its answers with P's token. They are the plain engine's answers."""

from dataclasses import replace
from typing import Any

import pytest

from layerpush.telemetry.metrics.catalog import FIRST_TOKENS
from tests.e2e import engines, probes
from tests.e2e.enginehost import MAX_TOKENS, EngineHost, Request
from tests.e2e.enginemetrics import scrape, wait_for
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fixtures import LogReader
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import (
    Handoff,
    Order,
    Reference,
    check,
    check_tokens,
    introduce,
    new_id,
    prompt,
    send,
)
from tests.e2e.results import Finished

LENGTHS = (1, 33, 257)
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
    lengths = LENGTHS if order != "mid" else (900,)
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


STOP, OTHER = 77, 78
FORBIDDING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "neither": ({}, {}),
    "P only": ({"min_tokens": 1}, {}),
    "D only": ({}, {"min_tokens": 3}),
    "both": ({"min_tokens": 1}, {"min_tokens": 1}),
}
"""``min_tokens`` in the bodies of P and D. vllm-router sends it to P alone."""


def ask_both(p: EngineHost, d: EngineHost, handoff: Handoff, on_p: dict[str, Any], on_d: dict[str, Any]) -> None:
    d.add(replace(handoff.to_d(), sampling=on_d))
    p.add(replace(handoff.to_p(), sampling=on_p))


def finished(host: EngineHost, token_ids: list[int], sampling: dict[str, Any]) -> Finished:
    """The answer of an engine alone."""
    request = Request(new_id(), token_ids, None, MAX_TOKENS, sampling)
    host.add(request)
    return host.wait_output(request.request_id)


@pytest.mark.parametrize(
    ("forbidding", "first"),
    [
        *((forbidding, STOP) for forbidding in FORBIDDING),
        ("neither", OTHER),
        *(pytest.param(forbidding, OTHER, marks=pytest.mark.exhaustive) for forbidding in ("P only", "D only", "both")),
    ],
)
def test_a_stop_token_is_the_first_of_an_answer_only_where_d_allows_it(
    fleet: Fleet, reference: Reference, forbidding: str, first: int
) -> None:
    p, d = introduced(fleet, engines.P_AUTO, engines.D_LAYER)
    before = origins(d)
    only_p, only_d = FORBIDDING[forbidding]
    common = {"logit_bias": {first: 100.0, OTHER: 50.0}, "stop_token_ids": [STOP]}
    handoff = Handoff(new_id(), prompt(300, seed=120), p, d)
    ask_both(p, d, handoff, common | only_p, common | only_d)
    answer, expected = d.wait_output(handoff.request_id), finished(reference.host, handoff.token_ids, common | only_d)
    assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason)
    p.wait_output(handoff.request_id)
    for host in (p, d):
        host.wait_idle()
    check_origins(d, before, **{"penalties" if only_d else "prefill": 1})


def test_random_answers_begin_with_ps_token_whether_it_stops_or_not(fleet: Fleet) -> None:
    """D never draws again: the first tokens have the probabilities of P's draws, and P's parameters are D's."""
    p, d = introduced(fleet, engines.P_AUTO, engines.D_LAYER)
    before = origins(d)
    drawn = {"temperature": 1.0, "allowed_token_ids": [STOP, OTHER], "stop_token_ids": [STOP]}
    # to this model both tokens are about as likely
    handoffs = [Handoff(new_id(), prompt(40, seed=130 + number), p, d) for number in range(24)]
    for handoff in handoffs:
        ask_both(p, d, handoff, drawn | {"min_tokens": 1}, drawn)
    firsts = []
    for handoff in handoffs:
        outcome = handoff.outcome()
        assert outcome.d_tokens[0] == outcome.p_tokens[0]
        assert (len(outcome.d_tokens) == 1) == (outcome.d_tokens[0] == STOP)
        firsts.append(outcome.d_tokens[0])
    assert set(firsts) == {STOP, OTHER}
    check_origins(d, before, prefill=len(handoffs))


def test_a_d_that_forbids_stop_tokens_draws_its_first_token_itself(fleet: Fleet) -> None:
    p, d = introduced(fleet, engines.P_AUTO, engines.D_LAYER)
    before = origins(d)
    drawn = {"temperature": 1.0, "allowed_token_ids": [STOP, OTHER], "stop_token_ids": [STOP]}
    handoffs = [Handoff(new_id(), prompt(40, seed=160 + number), p, d) for number in range(8)]
    for handoff in handoffs:
        ask_both(p, d, handoff, drawn | {"min_tokens": 1}, drawn | {"min_tokens": 2})
    assert {handoff.outcome().d_tokens[:2] for handoff in handoffs} == {(OTHER, OTHER)}
    check_origins(d, before, penalties=len(handoffs))


def test_d_logs_once_which_parameters_differ_on_p(fleet: Fleet, reference: Reference, logs: LogReader) -> None:
    p, d = introduced(fleet, engines.P_AUTO, engines.D_LAYER)
    before = origins(d)
    for number in range(2):
        handoff = Handoff(new_id(), prompt(300, seed=170 + number), p, d)
        ask_both(p, d, handoff, {"logit_bias": {5: 0.01}, "presence_penalty": 0.1}, {})
        check_tokens(handoff.outcome(), reference)
    check_origins(d, before, other_sampling=2)
    (line,) = [line for line in logs.new_text(d).splitlines() if "samples first tokens that" in line]
    assert f"prefill engine {p.engine_id} " in line
    assert line.endswith("has other sampling parameters: logit_bias, presence_penalty")
