"""Registrations that are missing, late, doubled, ambiguous or wrong, and handshakes that fail."""

import pytest

from tests.e2e import engines as e2e_engines
from tests.e2e import probes, wirefaults
from tests.e2e.enginehost import Request
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Order, Reference, check, new_id, prompt, send
from tests.e2e.pushtrace import wait_for_pushes
from tests.faults import engines
from tests.faults.checks import (
    PAUSE_S,
    LogView,
    check_idle_soon,
    check_load_failed,
    check_merged,
    check_serves,
    described,
    early,
    start,
    warm_up,
)
from tests.support.waiting import until

LENGTH = 640
ONE_DECODER = (engines.D, engines.for_test_all(engines.D_FAIL))
"""Either policy: it takes the reason from the same report."""


def test_registration_never_comes(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """The lease's end frees P's blocks."""
    p, d = fleet.get(engines.P_SHORT_LEASE, engines.D)
    handoff = Handoff(new_id(), prompt(LENGTH, seed=340), p, d)
    p.add(handoff.to_p())
    p.wait_output(handoff.request_id)
    assert p.call(probes.free_blocks) < p.idle_blocks
    check_idle_soon(p, engines.LEASE_S + engines.GRACE_S)
    log.check_one(p, handoff.request_id, "lease|expired")
    check_serves(p, d, reference, seed=341)


@pytest.mark.parametrize("d_spec", ONE_DECODER, ids=["recompute", "fail"])
def test_registration_after_the_lease(fleet: Fleet, reference: Reference, log: LogView, d_spec: EngineSpec) -> None:
    """P reports that the lease has ended: D need not wait for a deadline."""
    p, d = fleet.get(engines.P_SHORT_LEASE, d_spec)
    handoff = Handoff(new_id(), prompt(LENGTH, seed=342), p, d)
    p.add(handoff.to_p())
    finished = p.wait_output(handoff.request_id)
    check_idle_soon(p, engines.LEASE_S + engines.GRACE_S)
    d.add(handoff.to_d(finished.kv_transfer_params))
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    log.check_one(d, handoff.request_id, "lease")
    check_serves(p, d, reference, seed=343)


def test_p_never_gets_the_prompt(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """P lives but never gets the prompt. D's own `push_registration_timeout` ends the load."""
    p, d = fleet.get(engines.P, engines.D_HASTY)
    handoff = early(p, d, LENGTH, seed=344)
    check_load_failed(handoff, reference, timeout=engines.REGISTRATION_TIMEOUT_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, "push_registration_timeout")
    check_serves(p, d, reference, seed=345)


@pytest.mark.parametrize("d_spec", ONE_DECODER, ids=["recompute", "fail"])
def test_p_knows_no_such_request(fleet: Fleet, reference: Reference, log: LogView, d_spec: EngineSpec) -> None:
    """P refuses a registration without a request, long before D's deadline."""
    p, d = fleet.get(engines.P_TIGHT, d_spec)
    handoff = early(p, d, LENGTH, seed=344)
    check_load_failed(handoff, reference, timeout=engines.UNKNOWN_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, "no such request came")
    check_idle_soon(d)
    check_serves(p, d, reference, seed=345)


@pytest.mark.parametrize("order", ["early", engines.for_test_all("late")])
def test_registration_doubled(fleet: Fleet, reference: Reference, log: LogView, order: Order) -> None:
    """One push and one completion, with a copy beside the first registration and one after the end."""
    p, d = fleet.get(engines.P, engines.D)
    warm_up(p, d)
    p.call(wirefaults.watch)
    d.call(wirefaults.on_messages, "duplicate", "registration")
    handoff = start(p, d, LENGTH, 346, order)
    check(handoff.outcome(), reference)
    before = p.call(wirefaults.count_of, "got:registration")
    d.call(wirefaults.send_again, "registration", handoff.request_id)
    until(lambda: p.call(wirefaults.count_of, "got:registration") > before, "P has read the copy", pause_s=PAUSE_S)
    check_serves(p, d, reference, seed=347)
    check_merged(handoff)
    if order == "early":
        assert p.call(wirefaults.sent_kinds, handoff.request_id).count("completion") == 1
    for host in (p, d):
        log.check_none(host, handoff.request_id)


@pytest.mark.parametrize("order", [engines.for_test_all("registered first"), "prefilled first"])
def test_two_requests_share_a_base_id(fleet: Fleet, reference: Reference, log: LogView, order: str) -> None:
    """A router used one id twice: each D gets the KV of its own prompt."""
    p, *decoders = fleet.get(engines.P, engines.D, engines.D_FAIL)
    request_id = new_id()
    handoffs = [Handoff(request_id, prompt(LENGTH, seed=348 + number), p, d) for number, d in enumerate(decoders)]
    p.hold()
    if order == "prefilled first":
        p.add(*(handoff.to_p() for handoff in handoffs))
        p.step(2)
    for handoff in reversed(handoffs):
        handoff.d.add(handoff.to_d())
        handoff.await_registration()
    if order == "registered first":
        p.add(*(handoff.to_p() for handoff in handoffs))
    p.run()
    for handoff in handoffs:
        output = handoff.d.wait_output(request_id)
        assert output.token_ids == reference.tokens(handoff.token_ids)
        p.wait_output(request_id)
        log.check_none(handoff.d, request_id)
    if order == "prefilled first":
        both = wait_for_pushes(p.trace_dir, request_id, 2)
        late = [push for push in both if push.decode_engine_id == decoders[0].engine_id]
        assert [push.has_merged_write for push in late] == [True], "layers were ready before the registration"
    for d in decoders:
        check_serves(p, d, reference, seed=350)


@pytest.mark.parametrize(
    ("d_spec", "order"),
    [
        (engines.D, "D first"),
        (engines.D_FAIL, "P first"),
        engines.for_test_all(engines.D_FAIL, "D first"),
        engines.for_test_all(engines.D, "P first"),
    ],
    ids=described,
)
def test_prompts_differ(fleet: Fleet, reference: Reference, log: LogView, d_spec: EngineSpec, order: str) -> None:
    """A router gives one id to two prompts, and D's request has the router's id of P's request."""
    p, d = fleet.get(engines.P_SHORT_LEASE, d_spec)
    warm_up(p, d)
    at_p = Handoff(new_id(), prompt(LENGTH, seed=352), p, d)
    tokens = list(at_p.token_ids)
    tokens[50] += 1
    at_d = Handoff(at_p.request_id, tokens, p, d)
    if order == "D first":
        d.add(at_d.to_d())
        at_d.await_registration()
        p.add(at_p.to_p())
        p.wait_output(at_p.request_id)
    else:
        p.add(at_p.to_p())
        p.wait_output(at_p.request_id)
        d.add(at_d.to_d())
    check_load_failed(at_d, reference, timeout=engines.GRACE_S)
    log.check_one(d, at_d.request_id, "another prompt")
    check_idle_soon(p, engines.LEASE_S + engines.GRACE_S)
    refused, released = log.serious(p, at_d.request_id)
    assert "another prompt" in refused
    assert "Releasing expired KV blocks" in released
    check_serves(p, d, reference, seed=353)


@pytest.mark.parametrize("order", ["early", engines.for_test_all("late")])
def test_d_registers_more_blocks_than_the_prompt_has(
    fleet: Fleet, reference: Reference, log: LogView, order: Order
) -> None:
    """P cannot match the blocks, so it writes nothing."""
    p, d = fleet.get(engines.P, engines.D)
    p.call(wirefaults.watch)
    d.call(wirefaults.watch)
    d.call(wirefaults.change_registrations, "one block more")
    handoff = send(p, d, prompt(LENGTH, seed=351), order)
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    p.wait_output(handoff.request_id)
    log.check_one(d, handoff.request_id, "block")
    log.check_one(p, handoff.request_id, "block")
    assert p.call(wirefaults.count_of, "post") == 0
    d.call(wirefaults.reset)
    check_idle_soon(p)
    check_serves(p, d, reference, seed=352)


def test_d_registers_fewer_blocks_than_the_prompt_has(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """D registers the prompt's last blocks. The others are in D's prefix cache."""
    p, d = fleet.get(engines.P, e2e_engines.D_CACHING)
    d.call(wirefaults.watch)
    d.call(probes.reset_prefix_cache)
    token_ids = prompt(LENGTH, seed=353)
    known = Request(new_id(), token_ids[:320] + prompt(40, seed=354), None, max_tokens=1)
    d.add(known)
    d.wait_output(known.request_id)
    handoff = send(p, d, token_ids, "early")
    check(handoff.outcome(), reference)
    assert len(d.call(wirefaults.registered_blocks, handoff.request_id)) == -(-LENGTH // 32) - 320 // 32
    log.check_none(p, handoff.request_id)


@pytest.mark.parametrize("side", ["P", engines.for_test_all("D")])
def test_handshake_fails_then_succeeds(fleet: Fleet, reference: Reference, log: LogView, side: str) -> None:
    """A failed try delays the request. The request does not fail."""
    p, d = fleet.get(engines.P, engines.D)
    host = p if side == "P" else d
    p.call(wirefaults.forget_peers)
    d.call(wirefaults.forget_peers)
    log.tracebacks_expected = True
    host.call(wirefaults.fail_handshakes, 1)
    handoff = send(p, d, prompt(LENGTH, seed=355), "together")
    check(handoff.outcome(), reference)
    check_serves(p, d, reference, seed=356)


@pytest.mark.parametrize("side", [engines.for_test_all("P"), "D"])
def test_handshake_fails_for_good(fleet: Fleet, reference: Reference, log: LogView, side: str) -> None:
    """The request goes on without a push. The next one tries again. P reports its failure without a handshake."""
    p, d = fleet.get(engines.P_SHORT_LEASE, engines.D)
    host = p if side == "P" else d
    check_serves(p, d, reference, seed=359)
    p.call(wirefaults.forget_peers)
    d.call(wirefaults.forget_peers)
    log.tracebacks_expected = True
    host.call(wirefaults.fail_handshakes, 1 << 20)
    handoff = send(p, d, prompt(LENGTH, seed=357), "together")
    output = d.wait_output(handoff.request_id, timeout=engines.GRACE_S)
    assert output.token_ids == reference.tokens(handoff.token_ids)
    log.check_one(d, handoff.request_id, "(no handshake|its lease ran out)")
    host.call(wirefaults.fail_handshakes, 0)
    p.wait_output(handoff.request_id)
    check_serves(p, d, reference, seed=358)


def test_p_has_no_room(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """A prompt without a D fills P's cache. The next prompt, and its D, wait for the end of that lease."""
    p, d = fleet.get(engines.P_TIGHT, engines.D)
    unfetched = Handoff(new_id(), prompt(1600, seed=359), p, d)
    p.add(unfetched.to_p())
    p.wait_output(unfetched.request_id)
    handoff = early(p, d, 2000, seed=360)
    p.add(handoff.to_p())
    check(handoff.outcome(), reference)
    log.check_none(d, handoff.request_id)
    log.check_one(p, unfetched.request_id, "lease|expired")


@pytest.mark.parametrize(
    "d_spec",
    [engines.FULL_DECODERS[0], engines.for_test_all(engines.FULL_DECODERS[1])],
    ids=["recompute", "fail"],
)
def test_full_caches_in_opposite_orders(fleet: Fleet, reference: Reference, log: LogView, d_spec: EngineSpec) -> None:
    """P holds the first prompt, which D cannot register; D's blocks wait for the second, which P cannot begin."""
    p, d = fleet.get(engines.P_FULL, d_spec)
    warm_up(p, d)
    first, second = (Handoff(new_id(), prompt(1000, seed=354 + number), p, d) for number in range(2))
    p.add(first.to_p())
    p.wait_output(first.request_id)
    d.add(second.to_d())
    second.await_registration()
    d.add(first.to_d())
    p.add(second.to_p())
    for handoff in (first, second):
        output = d.wait_output(handoff.request_id, engines.GRACE_S)
        assert output.token_ids == reference.tokens(handoff.token_ids)
        log.check_none(d, handoff.request_id)
    check_serves(p, d, reference, seed=356)


@pytest.mark.parametrize("p_spec", [engines.for_test_all(engines.P), engines.P_NEAR], ids=described)
def test_a_new_p_never_reaches_d(fleet: Fleet, reference: Reference, log: LogView, p_spec: EngineSpec) -> None:
    """D does not know this P, which might be stock. P still reports the failure, after three tries. With
    ``allowed_hosts`` P first asks D's side channel for its address.
    """
    (p,) = fleet.spawn(p_spec)
    (d,) = fleet.get(engines.D)
    log.tracebacks_expected = True
    p.call(wirefaults.fail_handshakes, 1 << 20)
    handoff = early(p, d, LENGTH, seed=360)
    p.add(handoff.to_p())
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    log.check_one(d, handoff.request_id, "no handshake")
    check_idle_soon(d)
    p.call(wirefaults.fail_handshakes, 0)
    check_serves(p, d, reference, seed=361)


def test_p_may_not_connect_to_d(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """P cannot report the failure. By P's side channel D knows that P has layerpush, so silence is enough."""
    (p,) = fleet.spawn(engines.P_ELSEWHERE)
    (d,) = fleet.get(engines.D)
    handoff = early(p, d, LENGTH, seed=363)
    p.add(handoff.to_p())
    check_load_failed(handoff, reference, timeout=3 * engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, "nothing came from prefill agent")
    log.check_one(p, handoff.request_id, "is not in allowed_hosts")
    p.kill()
    check_idle_soon(d)


def test_d_wants_more_answers(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """P has one request for the prompt, D has two. The first gets P's push. The other load fails at once."""
    p, d = fleet.get(engines.P, engines.D)
    token_ids, request_id = prompt(LENGTH, seed=362), new_id()
    only = Handoff(request_id, token_ids, p, d)
    params = only.to_d().kv_transfer_params
    d.add(*(Request(f"{number}_{request_id}", token_ids, params) for number in range(2)))
    p.add(only.to_p())
    for number in range(2):
        output = d.wait_output(f"{number}_{request_id}", timeout=engines.GRACE_S)
        assert output.token_ids == reference.tokens(token_ids)
    log.check_none(d, f"0_{request_id}")
    log.check_one(d, f"1_{request_id}", "wants several")
    p.wait_output(request_id)
    assert only.push().outcome == "completed"
    check_idle_soon(p)


@pytest.mark.parametrize("why", ["another model", "aborted in the queue"])
def test_d_declines(fleet: Fleet, reference: Reference, log: LogView, why: str) -> None:
    """P's blocks do not wait for the lease."""
    p, d = fleet.get(engines.P, engines.D)
    p.call(wirefaults.forget_peers)
    d.call(wirefaults.forget_peers)
    handoff = Handoff(new_id(), prompt(LENGTH, seed=363), p, d)
    p.add(handoff.to_p())
    finished = p.wait_output(handoff.request_id)
    assert p.call(probes.free_blocks) < p.idle_blocks
    if why == "another model":
        log.tracebacks_expected = True
        d.call(wirefaults.claim_another_model, True)
        d.add(handoff.to_d(finished.kv_transfer_params))
        check_load_failed(handoff, reference, timeout=engines.GRACE_S)
        log.check_one(d, handoff.request_id, "NIXL compatibility hash mismatch")
        d.call(wirefaults.claim_another_model, False)
    else:
        d.hold()
        d.add(handoff.to_d(finished.kv_transfer_params))
        d.abort(handoff.request_id)
        d.run()
    check_idle_soon(p)
    check_serves(p, d, reference, seed=364)
