"""The configuration keys: the effects of each, and its lack of other effects."""

from typing import Any

import pytest

from tests.e2e import engines
from tests.e2e.enginehost import HostDied
from tests.e2e.enginespec import LAYERWISE, EngineSpec, Role, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, introduce, prompt, send
from tests.e2e.models import LAYERS
from tests.e2e.streamchecks import check_completed, check_streamed

LENGTHS = (1, 32, 33, 257, 513, 1500)


@pytest.mark.parametrize("order", ["early", "late", "together"])
def test_layerwise_off_is_whole_push(fleet: Fleet, reference: Reference, order: Order) -> None:
    p, d = fleet.get(engines.P_WHOLE, engines.D_LAYER)
    for length in LENGTHS:
        handoff = send(p, d, prompt(length, seed=20), order)
        check(handoff.outcome(), reference)
        push = handoff.push()
        check_completed(push, length)
        assert (push.mode, push.fallback, len(push.writes)) == ("request", None, 1)
        assert push.writes_before_last_ready == 0


@pytest.mark.parametrize("order", ["early", "late", "together"])
def test_granularity_chunk(fleet: Fleet, reference: Reference, order: Order) -> None:
    p, d = fleet.get(engines.P_CHUNK, engines.D_LAYER)
    for length in LENGTHS:
        handoff = send(p, d, prompt(length, seed=21), order)
        check(handoff.outcome(), reference)
        check_completed(handoff.push(), length)
    if order == "early":
        push = check_streamed(handoff, mode="chunk")
        assert len(push.writes) <= len(push.chunks)
        for write in push.writes:
            assert write["layers"] == [0, LAYERS - 1], "a chunk was not written with all its layers"


@pytest.mark.parametrize(
    ("configured", "default"),
    [(engines.P_AUTO, "auto"), (engines.P_LAYER, "layer"), (engines.P_WHOLE, "request")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_requests_choose_their_mode(fleet: Fleet, reference: Reference, configured: EngineSpec, default: str) -> None:
    """One P, all modes side by side. A request without a mode has the configured one."""
    p, d = fleet.get(configured, engines.D_LAYER)
    introduce(p, d)
    for mode in ("auto", "layer", "request", "chunk", None):
        handoff = send(p, d, prompt(1025, seed=24), "early", mode=mode)
        check(handoff.outcome(), reference)
        if (mode or default) != "request":
            check_streamed(handoff, mode=mode or default)
        else:
            push = handoff.push()
            check_completed(push, 1025)
            assert (push.mode, push.fallback, len(push.writes)) == ("request", None, 1)
            assert push.writes_before_last_ready == 0


def test_auto_needs_no_more_writes_than_layers(fleet: Fleet, reference: Reference) -> None:
    """The first prompts may go by layer: P knows neither the link nor the time of a layer yet."""
    p, d = fleet.get(engines.P_AUTO, engines.D_LAYER)
    introduce(p, d)
    for seed in (22, 26, 27):
        handoff = send(p, d, prompt(2000, seed=seed), "early")
        check(handoff.outcome(), reference)
        push = check_streamed(handoff, mode="auto")
        assert len(push.writes) <= len(push.chunks) * LAYERS


@pytest.mark.parametrize("length", [599, 600])
def test_short_prompts_go_whole(fleet: Fleet, reference: Reference, length: int) -> None:
    p, d = fleet.get(engines.P_LONG_ONLY, engines.D_LAYER)
    introduce(p, d)
    handoff = send(p, d, prompt(length, seed=23), "early")
    check(handoff.outcome(), reference)
    push = handoff.push()
    check_completed(push, length)
    if length < 600:
        assert push.mode == "request"
        assert "layerwise_min_tokens" in push.fallback
    else:
        check_streamed(handoff)


@pytest.mark.parametrize(
    ("role", "extra", "message"),
    [
        ("P", {"granularity": "block"}, "'granularity' is 'block'"),
        ("D", {"layer_wise": True}, "unknown key 'layer_wise'"),
    ],
)
def test_bad_configuration_stops_the_engine(fleet: Fleet, role: Role, extra: dict[str, Any], message: str) -> None:
    spec = EngineSpec("bad-config", role, transfer(LAYERWISE, **extra))
    with pytest.raises(HostDied, match=message) as death:
        fleet.get(spec)
    assert "ConfigError" in str(death.value)
