"""A push ends half-way: D's prefix cache keeps what has landed of the prompt, and only the rest is computed."""

import pytest

from tests.e2e import probes, wirefaults
from tests.e2e.enginehost import EngineHost, Request
from tests.e2e.enginespec import BLOCK_SIZE, PREFILL_TOKENS_PER_STEP, EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check_tokens, new_id
from tests.faults import engines
from tests.faults.checks import LogView, check_idle_soon, check_load_failed, early

LENGTH = 4 * PREFILL_TOKENS_PER_STEP - BLOCK_SIZE // 2
MAX_TOKENS = 4
GONE = "(dead|died|gone|ended|lost|restarted)"


def half_way(p: EngineHost, d: EngineHost, seed: int, chunks: int) -> Handoff:
    """P has computed so many of four chunks, and D knows that they have landed. P computes no more by itself."""
    handoff = early(p, d, LENGTH, seed, max_tokens=MAX_TOKENS)
    d.call(probes.count_scheduled_tokens)
    p.hold()
    p.add(handoff.to_p())
    assert p.step(chunks) == chunks
    d.poll_until(wirefaults.seen, "got:prefixlanded", chunks)
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


@pytest.mark.parametrize("chunks", [2, engines.for_test_all(1), engines.for_test_all(3)])
def test_p_killed_half_way(fleet: Fleet, reference: Reference, log: LogView, chunks: int) -> None:
    (p,) = fleet.spawn(engines.P)
    (d,) = fleet.get(engines.D_KEEPS)
    handoff = half_way(p, d, 600 + chunks, chunks)
    p.kill()
    check_load_failed(handoff, reference, timeout=engines.PEER_TIMEOUT_S + engines.GRACE_S)
    landed = chunks * PREFILL_TOKENS_PER_STEP
    log.check_one(d, handoff.request_id, f"{GONE}.*; the KV of its first {landed} tokens has landed")
    check_computed(d, handoff, chunks)
    check_answer(d, handoff, reference)
    check_idle_soon(d)


@pytest.mark.parametrize(
    "d_spec", [engines.D_FAIL_KEEPS, engines.for_test_all(engines.D_KEEPS)], ids=["fail", "recompute"]
)
def test_a_router_tries_again(fleet: Fleet, reference: Reference, log: LogView, d_spec: EngineSpec) -> None:
    """Another P pushes only the rest, whether D has failed the request or its client has left."""
    (p,) = fleet.spawn(engines.P)
    d, successor = fleet.get(d_spec, engines.P)
    handoff = half_way(p, d, 610, 2)
    if d_spec is engines.D_FAIL_KEEPS:
        p.kill()
        check_load_failed(handoff, reference, timeout=engines.PEER_TIMEOUT_S + engines.GRACE_S)
        log.check_one(d, handoff.request_id, GONE)
    else:
        d.abort(handoff.request_id)
        p.kill()
    d.wait_idle()
    again = Handoff(new_id(), handoff.token_ids, successor, d, MAX_TOKENS)
    d.add(again.to_d())
    again.await_registration()
    rest = LENGTH - 2 * PREFILL_TOKENS_PER_STEP
    assert len(d.call(wirefaults.registered_blocks, again.request_id)) == -(-rest // BLOCK_SIZE)
    successor.add(again.to_p())
    check_tokens(again.outcome(), reference)


def test_p_stopped_and_continued_half_way(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """D goes on with what has landed while the other blocks are parked. P, which wakes up, ends the push."""
    p, d = fleet.get(engines.P, engines.D_KEEPS)
    handoff = half_way(p, d, 620, 2)
    p.pause()
    check_load_failed(handoff, reference, timeout=3 * engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, "first 512 tokens has landed; its blocks are parked")
    check_computed(d, handoff, 2)
    p.resume()
    p.run()
    p.wait_output(handoff.request_id)
    check_idle_soon(d)
    check_answer(d, handoff, reference)
