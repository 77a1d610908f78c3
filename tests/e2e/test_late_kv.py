"""Engines whose KV becomes visible late behind the host, as on a GPU: P pushes no layer before it is in memory."""

from collections.abc import Callable

import pytest

from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost, Request
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, introduce, new_id, prompt, send

Traffic = Callable[[EngineHost, EngineHost], list[Handoff]]


def long_prompt(p: EngineHost, d: EngineHost) -> list[Handoff]:
    return [send(p, d, prompt(700, seed=140), "early")]


def cached_prefix(p: EngineHost, d: EngineHost) -> list[Handoff]:
    """The step before computes the prefix, and is not over on the device when the prompt's only step begins."""
    prefix = prompt(192, seed=141)
    (handoff,) = registered(p, d, prefix + prompt(40, seed=142))
    p.hold()
    local = Request(new_id(), prefix, None, max_tokens=1)
    p.add(local)
    p.step()
    p.add(handoff.to_p())
    p.run()
    p.wait_output(local.request_id)
    return [handoff]


def two_at_once(p: EngineHost, d: EngineHost) -> list[Handoff]:
    handoffs = registered(p, d, prompt(100, seed=143), prompt(600, seed=144))
    p.hold()
    p.add(*(handoff.to_p() for handoff in handoffs))
    p.run()
    return handoffs


def registered(p: EngineHost, d: EngineHost, *prompts: list[int]) -> list[Handoff]:
    handoffs = [Handoff(new_id(), token_ids, p, d) for token_ids in prompts]
    for handoff, decode_id in zip(handoffs, d.add(*(handoff.to_d() for handoff in handoffs)), strict=True):
        handoff.await_registration()
        p.poll_until(probes.has_registration, decode_id)
    return handoffs


def pair(fleet: Fleet, *, fenced: bool) -> list[EngineHost]:
    """P and D, connected."""
    p, d = fleet.get(engines.P_LATE, engines.D_LAYER)
    introduce(p, d)
    p.call(probes.fence, fenced)
    p.call(probes.reset_prefix_cache)
    return [p, d]


TRAFFIC = [long_prompt, cached_prefix, two_at_once]


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_a_push_waits_for_late_kv(fleet: Fleet, reference: Reference, traffic: Traffic) -> None:
    p, d = pair(fleet, fenced=True)
    for handoff in traffic(p, d):
        check(handoff.outcome(), reference)
        push = handoff.push()
        assert (push.fallback, push.swept_layers) == (None, 0)
        assert push.writes_before_last_ready > 0


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_a_push_without_fences_sends_stale_kv(fleet: Fleet, reference: Reference, traffic: Traffic) -> None:
    p, d = pair(fleet, fenced=False)
    for handoff in traffic(p, d):
        with pytest.raises(AssertionError, match="KV differs"):
            check(handoff.outcome(), reference)
