"""Prefix caching on P, on D and on both: P pushes only the blocks that D lacks, and they land in the right places."""

import math

import pytest

from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost, Request
from tests.e2e.enginespec import BLOCK_SIZE, PREFILL_TOKENS_PER_STEP
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Order, Reference, check, new_id, prompt, send
from tests.e2e.models import LAYERS
from tests.e2e.streamchecks import check_completed


def warm(host: EngineHost, token_ids: list[int]) -> None:
    """Let an engine compute a prompt by itself, so that its full blocks are in its prefix cache."""
    request = Request(new_id(), token_ids, None, max_tokens=1)
    host.add(request)
    host.wait_output(request.request_id)


def check_pushed(handoff: Handoff, *, cached_on_p: int, cached_on_d: int) -> None:
    """`cached_*` are tokens in full blocks. D always computes at least the last token by itself."""
    tokens = len(handoff.token_ids)
    chunks = math.ceil((tokens - cached_on_p) / PREFILL_TOKENS_PER_STEP)
    blocks = math.ceil(tokens / BLOCK_SIZE) - cached_on_d // BLOCK_SIZE
    push = handoff.push()
    check_completed(push, tokens, chunks=chunks, pushed_blocks=blocks, cached=cached_on_p > 0)
    if cached_on_d < cached_on_p:
        assert push.writes[0]["layers"] == [0, LAYERS - 1], "P did not push the cached prefix at once"


@pytest.mark.parametrize(
    ("order", "shared"), [("early", 32), ("together", 96), ("early", 512), ("late", 512), ("early", 992)]
)
def test_prefix_hit_on_p(fleet: Fleet, reference: Reference, order: Order, shared: int) -> None:
    """P computes only the rest, but pushes the shared blocks, too: D has no block."""
    p, d = fleet.get(engines.P_CACHING, engines.D_LAYER)
    p.call(probes.reset_prefix_cache)
    prefix = prompt(shared, seed=40)
    warm(p, prefix + prompt(50, seed=41))
    handoff = send(p, d, prefix + prompt(200, seed=42), order)
    check(handoff.outcome(), reference)
    check_pushed(handoff, cached_on_p=shared, cached_on_d=0)


def test_whole_prompt_cached_on_p(fleet: Fleet, reference: Reference) -> None:
    """P computes one block at most. All other blocks are ready before its step begins."""
    p, d = fleet.get(engines.P_CACHING, engines.D_LAYER)
    for length in (64, 65, 512):
        p.call(probes.reset_prefix_cache)
        token_ids = prompt(length, seed=43)
        warm(p, token_ids)
        handoff = send(p, d, token_ids, "early")
        check(handoff.outcome(), reference)
        check_pushed(handoff, cached_on_p=(length - 1) // BLOCK_SIZE * BLOCK_SIZE, cached_on_d=0)


def test_blocks_shared_with_a_request_of_the_same_step(fleet: Fleet, reference: Reference) -> None:
    """The second prompt hits blocks of the first one, from the same step or from the step before."""
    p, d = fleet.get(engines.P_CACHING, engines.D_LAYER)
    p.call(probes.reset_prefix_cache)
    prefix = prompt(192, seed=44)
    handoffs = [Handoff(new_id(), prefix + prompt(rest, seed=45), p, d) for rest in (30, 40, 300, 700)]
    p.hold()
    d.add(*(handoff.to_d() for handoff in handoffs))
    for handoff in handoffs:
        handoff.await_registration()
    p.add(*(handoff.to_p() for handoff in handoffs))
    p.run()
    for handoff in handoffs:
        check(handoff.outcome(), reference)


@pytest.mark.parametrize(
    ("order", "shared"),
    [("early", 32), ("together", 256), ("early", 320), ("mid", 320), ("late", 320), ("mid", 960), ("early", 960)],
)
def test_partial_hit_on_d(fleet: Fleet, reference: Reference, order: Order, shared: int) -> None:
    """D registers only its missing blocks. Chunks before them send nothing."""
    p, d = fleet.get(engines.P_LAYER, engines.D_CACHING)
    d.call(probes.reset_prefix_cache)
    prefix = prompt(shared, seed=46)
    warm(d, prefix + prompt(10, seed=47))
    handoff = send(p, d, prefix + prompt(600, seed=48), order)
    check(handoff.outcome(), reference)
    check_pushed(handoff, cached_on_p=0, cached_on_d=shared)


def test_nearly_everything_cached_on_d(fleet: Fleet, reference: Reference) -> None:
    """D registers only the last, partly filled block."""
    p, d = fleet.get(engines.P_LAYER, engines.D_CACHING)
    for length in (65, 257):
        d.call(probes.reset_prefix_cache)
        token_ids = prompt(length, seed=49)
        warm(d, token_ids)
        handoff = send(p, d, token_ids, "early")
        check(handoff.outcome(), reference)
        check_pushed(handoff, cached_on_p=0, cached_on_d=length // BLOCK_SIZE * BLOCK_SIZE)


@pytest.mark.parametrize(
    ("order", "on_p", "on_d"),
    [("early", 512, 128), ("early", 128, 512), ("late", 128, 512), ("together", 512, 128), ("early", 320, 320)],
)
def test_hits_on_both(fleet: Fleet, reference: Reference, order: Order, on_p: int, on_d: int) -> None:
    p, d = fleet.get(engines.P_CACHING, engines.D_CACHING)
    for host in (p, d):
        host.call(probes.reset_prefix_cache)
    token_ids = prompt(900, seed=50)
    warm(p, token_ids[:on_p] + prompt(10, seed=51))
    warm(d, token_ids[:on_d] + prompt(10, seed=52))
    handoff = send(p, d, token_ids, order)
    check(handoff.outcome(), reference)
    check_pushed(handoff, cached_on_p=on_p, cached_on_d=on_d)


def test_a_pushed_prompt_is_a_hit_for_the_next(fleet: Fleet, reference: Reference) -> None:
    """Blocks that arrived by push are in D's prefix cache: a longer prompt registers only the rest."""
    p, d = fleet.get(engines.P_CACHING, engines.D_CACHING)
    for host in (p, d):
        host.call(probes.reset_prefix_cache)
    first = prompt(640, seed=53)
    check(send(p, d, first, "early").outcome(), reference)
    handoff = send(p, d, first + prompt(100, seed=54), "early")
    check(handoff.outcome(), reference)
    check_pushed(handoff, cached_on_p=640, cached_on_d=640)
