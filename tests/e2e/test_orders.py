"""D registers early, mid-prefill or after P finished; prompts around every block and chunk boundary."""

from dataclasses import replace

import pytest

from tests.e2e import engines
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Order, Reference, check, introduce, new_id, prompt, send
from tests.e2e.models import LAYERS
from tests.e2e.streamchecks import check_completed, check_streamed
from tests.support.scripts import made_by

AROUND_BLOCKS = (1, 2, 3, 16, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 223, 224, 225)
AROUND_CHUNKS = (255, 256, 257, 287, 288, 289, 511, 512, 513, 543, 544, 545, 767, 768, 769)
LONG = (1000, 1023, 1024, 1025, 1500, 1999, 2000, 2048, 2049, 3001)
LENGTHS = AROUND_BLOCKS + AROUND_CHUNKS + LONG
BOUNDARIES = (1, 32, 33, 255, 256, 257, 1025)
Pair = tuple[EngineSpec, EngineSpec]
PAIRS = {"UCX": (engines.P_LAYER, engines.D_LAYER), "LIBFABRIC": (engines.P_FABRIC, engines.D_FABRIC)}
STREAMS_FOR_SURE = 600  # tokens; shorter prompts may be computed before P has read D's registration


@pytest.fixture(params=["UCX", pytest.param("LIBFABRIC", marks=pytest.mark.exhaustive)])
def pair(request: pytest.FixtureRequest) -> Pair:
    """P and D over one of NIXL's backends."""
    if request.param == "LIBFABRIC":
        made_by("libfabric")
    return PAIRS[request.param]


@pytest.mark.parametrize("lengths", [BOUNDARIES, pytest.param(LENGTHS, marks=pytest.mark.exhaustive)], ids=len)
@pytest.mark.parametrize("order", ["early", "late", "together"])
def test_tokens_and_bytes(
    fleet: Fleet, reference: Reference, pair: Pair, order: Order, lengths: tuple[int, ...]
) -> None:
    """The plain engine's tokens, and P's bytes on D."""
    p, d = fleet.get(*pair)
    for length in lengths:
        handoff = send(p, d, prompt(length), order)
        check(handoff.outcome(), reference)
        check_completed(handoff.push(), length)


@pytest.mark.parametrize("length", [STREAMS_FOR_SURE, 1024, 2049])
def test_registered_early_streams_every_chunk(fleet: Fleet, reference: Reference, pair: Pair, length: int) -> None:
    p, d = fleet.get(*pair)
    introduce(p, d)
    handoff = send(p, d, prompt(length, seed=1), "early")
    check(handoff.outcome(), reference)
    push = check_streamed(handoff)
    assert len(push.writes) > len(push.chunks), "layers were not written one by one"


@pytest.mark.parametrize(("length", "after_steps"), [(300, 1), (1500, 2), (2049, 8)])
def test_registered_mid_prefill(fleet: Fleet, reference: Reference, pair: Pair, length: int, after_steps: int) -> None:
    """P first pushes the layers that were ready before the registration. The rest streams."""
    p, d = fleet.get(*pair)
    handoff = send(p, d, prompt(length, seed=after_steps), "mid", after_steps=after_steps)
    check(handoff.outcome(), reference)
    push = handoff.push()
    check_completed(push, length)
    assert push.mode == "layer"
    first_write = min(write["t_post"] for write in push.writes)
    caught_up = [layer for chunk, layer, at, _ in push.ready if at < first_write]
    assert len(caught_up) >= after_steps * LAYERS, "a WRITE went out before D had registered"


def test_registered_after_p_finished_goes_whole(fleet: Fleet, reference: Reference, pair: Pair) -> None:
    p, d = fleet.get(*pair)
    handoff = send(p, d, prompt(1200), "late")
    check(handoff.outcome(), reference)
    push = handoff.push()
    assert push.mode == "request"
    assert push.fallback is not None
    assert push.writes_before_last_ready == 0
    check_completed(push, 1200)


def test_registered_after_the_last_step_while_p_stands_still(fleet: Fleet, reference: Reference, pair: Pair) -> None:
    """D registers while P stands still right after its last chunk: only P's own polling wakes it."""
    p, d = fleet.get(*pair)
    handoff = send(p, d, prompt(700, seed=3), "after_last_step")
    check(handoff.outcome(), reference)
    check_completed(handoff.push(), 700)


def test_ids_of_the_two_requests_differ(fleet: Fleet, reference: Reference, pair: Pair) -> None:
    """`remote_request_id` alone says which prompt D wants."""
    p, d = fleet.get(*pair)
    handoff = Handoff(new_id(), prompt(300, seed=4), p, d)
    at_d = replace(handoff.to_d(), request_id=new_id())
    d.add(at_d)
    p.add(handoff.to_p())
    assert d.wait_output(at_d.request_id).token_ids == reference.tokens(handoff.token_ids)
    p.wait_output(handoff.request_id)
    check_completed(handoff.push(), 300)
