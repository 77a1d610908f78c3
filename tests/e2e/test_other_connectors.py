"""Another connector beside layerpush, on P and on D. It loads blocks of prompts, and loses some.

vLLM finds out about a lost block after the step that has read it, and takes the step back: P computes the block again,
or ends the request. D must answer as a plain engine in both cases.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.e2e import engines, memorystore, probes
from tests.e2e.enginehost import EngineHost, Request
from tests.e2e.enginespec import BLOCK_SIZE, EngineSpec
from tests.e2e.fixtures import LogReader
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, introduce, new_id, prompt, send
from tests.e2e.memorystore import Way

WAYS = ("sync", "layer", "async")
STORED = 160
LENGTHS = (230, 900)
"""Of a prompt that P computes in one step, or in several."""
LOST = 3
"""The index of the block that a store loses."""


def half(*choices: Sequence[Any]) -> list[Any]:
    """All combinations. `make test` runs every other one, with each of the choices; `make test-all` runs all."""
    found = []
    for numbered in product(*map(enumerate, choices)):
        numbers, values = zip(*numbered, strict=True)
        marks = (pytest.mark.exhaustive,) if sum(numbers) % 2 else ()
        found.append(pytest.param(*values, marks=marks, id="-".join(str(getattr(one, "name", one)) for one in values)))
    return found


def pair(fleet: Fleet, on_p: EngineSpec, on_d: EngineSpec = engines.D_LAYER) -> list[EngineHost]:
    """P and D, connected."""
    hosts = fleet.get(on_p, on_d)
    introduce(*hosts)
    return hosts


def stored(host: EngineHost, way: Way, policy: str = "recompute", *, seed: int) -> list[int]:
    """A prompt that the engine's store has."""
    host.call(memorystore.begin, way, policy)
    token_ids = prompt(STORED, seed)
    request = Request(new_id(), token_ids, None, max_tokens=1)
    host.add(request)
    host.wait_output(request.request_id)
    return token_ids


def registered(*handoffs: Handoff) -> tuple[Handoff, ...]:
    """P knows the registrations before it gets the prompts. P may be paused."""
    for handoff in handoffs:
        (decode_id,) = handoff.d.add(handoff.to_d())
        handoff.p.poll_until(probes.has_registration, decode_id)
    return handoffs


@pytest.mark.parametrize(
    ("spec", "way", "length"), half((engines.P_BEHIND_STORE, engines.P_BEFORE_STORE), WAYS, LENGTHS)
)
def test_p_computes_a_lost_block_again(
    fleet: Fleet, reference: Reference, spec: EngineSpec, way: Way, length: int
) -> None:
    p, d = pair(fleet, spec)
    known = stored(p, way, seed=80)
    p.call(memorystore.lose, LOST)
    (handoff,) = registered(Handoff(new_id(), known + prompt(length - STORED, seed=81), p, d))
    p.add(handoff.to_p())
    check(handoff.outcome(), reference)
    push = handoff.push()
    assert p.call(memorystore.counts) == (STORED // BLOCK_SIZE, 1)
    assert (push.outcome, push.mode) == ("completed", "layer")
    if way != "async":
        assert push.epoch == 1, "vLLM took no step back"


@pytest.mark.parametrize(("way", "length"), half(WAYS, LENGTHS))
def test_steps_in_flight_are_taken_back(fleet: Fleet, reference: Reference, way: Way, length: int) -> None:
    """vLLM plans the next step before it knows of the lost block, and may answer P's client from that step."""
    p, d = pair(fleet, engines.P_STEPS_IN_FLIGHT)
    known = stored(p, way, seed=89)
    p.call(memorystore.lose, LOST)
    (handoff,) = registered(Handoff(new_id(), known + prompt(length - STORED, seed=90), p, d))
    p.add(handoff.to_p())
    p.wait_output(handoff.request_id)
    assert d.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)
    assert p.call(memorystore.counts)[1] == 1


@pytest.mark.parametrize(("way", "length"), half(WAYS, LENGTHS))
def test_p_fails_a_request_with_a_lost_block(
    fleet: Fleet, reference: Reference, logs: LogReader, way: Way, length: int
) -> None:
    """D gets no completion, but the failure, and computes the prompt itself."""
    p, d = pair(fleet, engines.P_BEHIND_STORE, engines.D_BEHIND_STORE)
    known = stored(p, way, "fail", seed=82)
    p.call(memorystore.lose, LOST)
    (handoff,) = registered(Handoff(new_id(), known + prompt(length - STORED, seed=83), p, d))
    p.add(handoff.to_p())
    assert p.wait_output(handoff.request_id).finish_reason == "error"
    (complaint,) = logs.errors(p)
    assert "Failing 1 request(s) due to KV load failure" in complaint
    assert d.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)
    if way != "async":  # else no step of it has begun
        assert handoff.push().outcome == "cancelled"


@pytest.mark.parametrize(("mode", "order"), [(None, "late"), ("request", "early")])
def test_whole_pushes_and_late_registrations_begin_with_the_right_bytes(
    fleet: Fleet, reference: Reference, mode: str | None, order: str
) -> None:
    p, d = pair(fleet, engines.P_BEHIND_STORE)
    known = stored(p, "sync", seed=84)
    p.call(memorystore.lose, LOST)
    handoff = send(p, d, known + prompt(70, seed=85), order, mode=mode)
    check(handoff.outcome(), reference)
    assert p.call(memorystore.counts)[1] == 1


@pytest.mark.parametrize("pushed_first", [True, False], ids=["loads for a push", "loads for another request"])
def test_a_lost_block_in_the_prefix_cache_of_the_same_step(
    fleet: Fleet, reference: Reference, pushed_first: bool
) -> None:
    """The second request hits blocks that the step is loading for the first one. vLLM takes the step back for both."""
    p, d = pair(fleet, engines.P_BEHIND_STORE)
    known = stored(p, "sync", seed=86)
    first = Handoff(new_id(), known + prompt(20, seed=87), p, d)
    second = Handoff(new_id(), known + prompt(30, seed=88), p, d)
    p.call(memorystore.lose, LOST)
    p.hold()
    pushed = registered(*([first, second] if pushed_first else [second]))
    loading = first.to_p() if pushed_first else Request(first.request_id, first.token_ids, None, max_tokens=1)
    p.add(loading, second.to_p())
    p.run()
    for handoff in pushed:
        check(handoff.outcome(), reference)
        assert handoff.push().epoch == 1
    if not pushed_first:
        p.wait_output(first.request_id)
    assert p.call(memorystore.counts) == (STORED // BLOCK_SIZE, 1)


@pytest.mark.parametrize(
    ("spec", "way", "lost"), half((engines.D_BEHIND_STORE, engines.D_BEFORE_STORE), WAYS, (None, 0, LOST))
)
def test_d_has_a_part_of_the_prompt(
    fleet: Fleet, reference: Reference, spec: EngineSpec, way: Way, lost: int | None
) -> None:
    p, d = pair(fleet, engines.P_LAYER, spec)
    known = stored(d, way, seed=91)
    d.call(memorystore.lose, 1 << 30 if lost is None else lost)
    handoff = Handoff(new_id(), known + prompt(100, seed=92), p, d)
    d.add(handoff.to_d())
    p.add(handoff.to_p())
    assert p.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)[:1]
    assert d.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)


@pytest.mark.parametrize(("spec", "way"), half((engines.D_BEHIND_STORE, engines.D_BEFORE_STORE), WAYS))
def test_both_sides_lose_a_block(fleet: Fleet, reference: Reference, spec: EngineSpec, way: Way) -> None:
    p, d = pair(fleet, engines.P_BEHIND_STORE, spec)
    known = stored(p, way, seed=93)
    d.call(memorystore.begin, way, "recompute")
    for tail in (94, 95):  # D's store has the first prompt from the push
        p.call(memorystore.lose, LOST)
        d.call(memorystore.lose, LOST)
        handoff = Handoff(new_id(), known + prompt(300, seed=tail), p, d)
        d.add(handoff.to_d())
        p.add(handoff.to_p())
        p.wait_output(handoff.request_id)
        assert d.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)
