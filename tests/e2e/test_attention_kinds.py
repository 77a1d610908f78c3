"""Models with layers that do not attend to the whole prompt."""

import pytest

from tests.e2e.enginehost import MAX_TOKENS
from tests.e2e.enginespec import LAYERWISE, STOCK, TRACE, EngineSpec, ModelName, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, prompt, send, started_on_p


@pytest.mark.parametrize("order", ["early", "late", "together"])  # varies fastest, so that engines are shared
@pytest.mark.parametrize("connector", [LAYERWISE, pytest.param(STOCK, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("model", ["sliding", "hybrid"])
def test_sliding_window(fleet: Fleet, model: ModelName, order: Order, connector: str) -> None:
    """D registers only the blocks inside the window of such layers."""
    ours = connector == LAYERWISE
    p_transfer = transfer(LAYERWISE, granularity="layer", trace_dir=TRACE) if ours else transfer(STOCK)
    d_transfer = transfer(LAYERWISE) if ours else transfer(STOCK)
    p, d, plain = fleet.get(
        EngineSpec(f"P-{model}-{connector[:4]}", "P", p_transfer, model=model),
        EngineSpec(f"D-{model}-{connector[:4]}", "D", d_transfer, model=model),
        EngineSpec(f"R-{model}", "R", None, model=model),
    )
    reference = Reference(plain)
    for length in (1, 199, 200, 201, 257, 480, 1100):
        handoff = send(p, d, prompt(length, seed=110), order)
        check(handoff.outcome(), reference)
        if ours:
            assert (handoff.push().outcome, handoff.push().swept_layers) == ("completed", 0)
    assert not ours or order != "late" or started_on_p(d), "no answer has started with P's token"


@pytest.mark.parametrize(("p_mode", "order"), [("layer", "early"), ("layer", "late"), ("whole", "together")])
def test_chunked_attention(fleet: Fleet, p_mode: str, order: Order) -> None:
    """Llama-4's local layers attend only to their own chunk of the prompt. D has each block of the last one."""
    modes = {"layer": {"granularity": "layer"}, "whole": {"layerwise": False}}
    p, d, plain = fleet.get(
        EngineSpec(f"P-chunked-{p_mode}", "P", transfer(LAYERWISE, trace_dir=TRACE, **modes[p_mode]), model="chunked"),
        EngineSpec("D-chunked", "D", transfer(LAYERWISE), model="chunked"),
        EngineSpec("R-chunked", "R", None, model="chunked"),
    )
    reference = Reference(plain)
    for length in (1, 128, 129, 257, 700, 1024):
        for max_tokens in (1, MAX_TOKENS):  # D computes a single token itself
            handoff = send(p, d, prompt(length, seed=112), order, max_tokens=max_tokens)
            check(handoff.outcome(), reference)
            assert handoff.push().outcome == "completed"


@pytest.mark.parametrize("order", ["early", "late"])
def test_latent_attention(fleet: Fleet, order: Order) -> None:
    """MLA keeps one vector per token. KV bytes only: vLLM's CPU prefill and decode paths round it differently."""
    options = (("load_format", "dummy"), ("dtype", "bfloat16"))
    p_transfer = transfer(LAYERWISE, granularity="layer", trace_dir=TRACE)
    p, d = fleet.get(
        EngineSpec("P-mla", "P", p_transfer, options, "mla"),
        EngineSpec("D-mla", "D", transfer(LAYERWISE), options, "mla"),
    )
    for length in (1, 33, 257, 1100):
        handoff = send(p, d, prompt(length, seed=111), order)
        handoff.outcome()
        assert handoff.differing_cells() == []
        assert (handoff.push().outcome, handoff.push().swept_layers) == ("completed", 0)
