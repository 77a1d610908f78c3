"""A push ends half-way: D's prefix cache keeps what has landed of the prompt, and only the rest is computed."""

import pytest

from tests.e2e import probes, wirefaults
from tests.e2e.cutlink import cut_off
from tests.e2e.enginehost import EngineHost, Request
from tests.e2e.enginespec import BLOCK_SIZE, PREFILL_TOKENS_PER_STEP, EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, check_tokens, new_id, prompt, send
from tests.faults import engines
from tests.faults.checks import ENDED, LogView, check_idle_soon, check_load_failed, early

CHUNKS = 10
LENGTH = CHUNKS * PREFILL_TOKENS_PER_STEP - BLOCK_SIZE // 2
MAX_TOKENS = 4
FEW, HALF, MOST = 1, 5, 9
SILENT_S = 3 * engines.PEER_TIMEOUT_S + engines.GRACE_S
"""D has parked the load of a silent P by then."""


def half_way(p: EngineHost, d: EngineHost, seed: int, chunks: int) -> Handoff:
    """P has computed so many of the chunks, and D knows that they have landed. P computes no more by itself."""
    handoff = early(p, d, LENGTH, seed, max_tokens=MAX_TOKENS)
    d.call(probes.count_scheduled_tokens)
    p.hold()
    p.add(handoff.to_p())
    before = d.call(wirefaults.count_of, "got:prefixlanded")
    for chunk in range(chunks):  # P sends one message for all chunks that it sees landed at a time
        assert p.step() == 1
        d.poll_until(wirefaults.seen, "got:prefixlanded", before + chunk + 1)
    return handoff


def check_computed(d: EngineHost, handoff: Handoff, chunks: int) -> None:
    """Check that D has computed the tokens behind so many chunks, and its answer."""
    computed = d.call(probes.scheduled_tokens, handoff.request_id)
    assert computed == LENGTH - chunks * PREFILL_TOKENS_PER_STEP + MAX_TOKENS - 1


def check_answer(d: EngineHost, handoff: Handoff, reference: Reference) -> None:
    """Check that D still has the right KV: the same prompt finds it in the prefix cache."""
    again = Request(new_id(), handoff.token_ids, None, MAX_TOKENS)
    d.add(again)
    assert d.wait_output(again.request_id).token_ids == reference.tokens(handoff.token_ids, MAX_TOKENS)


def check_parked(d: EngineHost, handoff: Handoff, reference: Reference, log: LogView, chunks: int) -> None:
    """Check that D goes on with what has landed while the other blocks are parked."""
    check_load_failed(handoff, reference, timeout=SILENT_S)
    landed = chunks * PREFILL_TOKENS_PER_STEP
    log.check_one(d, handoff.request_id, f"first {landed} tokens has landed; its blocks are parked")
    check_computed(d, handoff, chunks)


def check_push_ends(p: EngineHost, d: EngineHost, handoff: Handoff, reference: Reference) -> None:
    """Check that P, which D has given up, ends the push without harm."""
    p.run()
    p.wait_output(handoff.request_id)
    check_idle_soon(d, SILENT_S)
    check_answer(d, handoff, reference)


@pytest.mark.parametrize("chunks", [HALF, engines.for_test_all(FEW), engines.for_test_all(MOST)])
def test_p_killed_half_way(fleet: Fleet, reference: Reference, log: LogView, chunks: int) -> None:
    (p,) = fleet.get(engines.P_VICTIM)
    (d,) = fleet.get(engines.D_KEEPS)
    handoff = half_way(p, d, 600 + chunks, chunks)
    p.kill()
    check_load_failed(handoff, reference, timeout=engines.PEER_TIMEOUT_S + engines.GRACE_S)
    landed = chunks * PREFILL_TOKENS_PER_STEP
    log.check_one(d, handoff.request_id, f"{ENDED}.*; the KV of its first {landed} tokens has landed")
    check_computed(d, handoff, chunks)
    check_answer(d, handoff, reference)
    check_idle_soon(d)


def test_p_aborts_half_way(fleet: Fleet, reference: Reference, log: LogView) -> None:
    p, d = fleet.get(engines.P, engines.D_KEEPS)
    handoff = half_way(p, d, 660, HALF)
    p.abort(handoff.request_id)
    p.run()
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    landed = HALF * PREFILL_TOKENS_PER_STEP
    log.check_one(d, handoff.request_id, f"abort.*; the KV of its first {landed} tokens has landed")
    check_computed(d, handoff, HALF)
    check_answer(d, handoff, reference)
    check_idle_soon(d)


@pytest.mark.parametrize(
    "d_spec", [engines.D_FAIL_KEEPS, engines.for_test_all(engines.D_KEEPS)], ids=["fail", "recompute"]
)
def test_a_router_tries_again(fleet: Fleet, reference: Reference, log: LogView, d_spec: EngineSpec) -> None:
    """Another P pushes only the rest, whether D has failed the request or its client has left."""
    (p,) = fleet.get(engines.P_VICTIM)
    d, successor = fleet.get(d_spec, engines.P)
    handoff = half_way(p, d, 610, HALF)
    if d_spec is engines.D_FAIL_KEEPS:
        p.kill()
        check_load_failed(handoff, reference, timeout=engines.PEER_TIMEOUT_S + engines.GRACE_S)
        landed = HALF * PREFILL_TOKENS_PER_STEP
        log.check_one(d, handoff.request_id, f"{ENDED}.*; the KV of its first {landed} tokens has landed")
    else:
        d.abort(handoff.request_id)
        p.kill()
    d.wait_idle()
    again = Handoff(new_id(), handoff.token_ids, successor, d, MAX_TOKENS)
    d.add(again.to_d())
    again.await_registration()
    rest = LENGTH - HALF * PREFILL_TOKENS_PER_STEP
    assert len(d.call(wirefaults.registered_blocks, again.request_id)) == -(-rest // BLOCK_SIZE)
    successor.add(again.to_p())
    check_tokens(again.outcome(), reference)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunks", [FEW, HALF, MOST])
def test_p_stopped_and_continued_half_way(fleet: Fleet, reference: Reference, log: LogView, chunks: int) -> None:
    p, d = fleet.get(engines.P, engines.D_KEEPS)
    handoff = half_way(p, d, 620 + chunks, chunks)
    p.pause()
    check_parked(d, handoff, reference, log, chunks)
    p.resume()
    check_push_ends(p, d, handoff, reference)


@pytest.mark.parametrize("chunks", [FEW, engines.for_test_all(HALF), engines.for_test_all(MOST)])
def test_link_cut_half_way(fleet: Fleet, reference: Reference, log: LogView, chunks: int) -> None:
    """Bytes of the next chunk are in the network all the time, and land when the link works again."""
    p, d = fleet.get(engines.P, engines.D_KEEPS)
    handoff = half_way(p, d, 630 + chunks, chunks)
    posts = p.call(wirefaults.count_of, "post")
    with cut_off(p, d):
        assert p.step() == 1
        p.poll_until(wirefaults.seen, "post", posts + 1)
        check_parked(d, handoff, reference, log, chunks)
        assert not d.call(wirefaults.seen, "got:prefixlanded", chunks + 1)
    check_push_ends(p, d, handoff, reference)


@pytest.mark.parametrize("chunks", [MOST, engines.for_test_all(FEW), engines.for_test_all(HALF)])
def test_p_preempted_half_way(fleet: Fleet, reference: Reference, log: LogView, chunks: int) -> None:
    """P computes the prompt anew, and writes no byte twice."""
    p, d = fleet.get(engines.P, engines.D_KEEPS)
    whole = send(p, d, prompt(LENGTH, seed=650 + chunks), "early")
    check(whole.outcome(), reference)
    handoff = half_way(p, d, 640 + chunks, chunks)
    assert p.call(probes.preempt_all)
    p.run()
    check(handoff.outcome(), reference)
    log.check_none(d, handoff.request_id)
    push = handoff.push()
    assert push.epoch == 1
    assert len(push.chunks) == CHUNKS
    assert sum(write["bytes"] for write in push.writes) == sum(write["bytes"] for write in whole.push().writes)
