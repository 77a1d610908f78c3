"""A seed decides the same every time, and leaves no kind of fault out."""

from __future__ import annotations

from tests.faults.soak.kinds import KINDS
from tests.faults.soak.plan import FaultPlan, RequestPlan
from tests.faults.soak.soak import HANG_S
from tests.faults.soak.specs import LEASE_S, MAX_MODEL_LEN, PEER_TIMEOUT_S, REGISTRATION_TIMEOUT_S, WRITE_TIMEOUT_S
from tests.faults.soak.traffic import EXTRA_TOKENS, LATE_AFTER_S


def test_equal_seeds_give_equal_requests_and_faults():
    for _ in range(2):
        plans = [RequestPlan(7, KINDS) for _ in range(2)]
        assert [plans[0].next() for _ in range(50)] == [plans[1].next() for _ in range(50)]
    assert FaultPlan(7, KINDS).round(60) == FaultPlan(7, KINDS).round(60)
    assert RequestPlan(7, KINDS).next() != RequestPlan(8, KINDS).next()


def test_every_kind_comes_up_before_any_comes_up_twice():
    plan, seen = FaultPlan(1, KINDS), []
    while len(seen) < 300:
        seen += [fault.kind for fault in plan.round(30)]
    for place in ("engine", "wire"):
        kinds = [kind for kind in KINDS if kind.place == place]
        first = [kind for kind in seen if kind.place == place][: len(kinds)]
        assert sorted(kind.name for kind in first) == sorted(kind.name for kind in kinds)
    requests = RequestPlan(1, KINDS)
    own = {requests.next().fault for _ in range(300)}
    assert own == {kind.name for kind in KINDS if kind.place == "request"} | {None}


def test_prompts_fit_the_engines_and_some_share_a_prefix():
    plan = RequestPlan(5, KINDS)
    requests = [plan.next() for _ in range(200)]
    answer = max(request.max_tokens for request in requests)
    assert max(len(request.token_ids) for request in requests) + max(EXTRA_TOKENS) + answer <= MAX_MODEL_LEN
    assert max(len(request.token_ids) for request in plan.burst(20)) + answer <= MAX_MODEL_LEN
    starts = [request.token_ids[:32] for request in requests if len(request.token_ids) >= 64]
    assert len(set(starts)) < len(starts)
    odd = [request.token_ids[:32] for request in requests if request.fault == "unequal"]
    assert all(starts.count(start) <= 1 for start in odd), "a prefix in D's cache would hide the number of blocks"


def test_every_deadline_ends_before_a_request_counts_as_hung():
    assert LATE_AFTER_S > LEASE_S
    assert 2 * max(PEER_TIMEOUT_S, WRITE_TIMEOUT_S) + LATE_AFTER_S + REGISTRATION_TIMEOUT_S < HANG_S
