"""Layers with a state and a prefix cache, vLLM's default for such models: a prompt then has several states."""

import pytest

from tests.e2e import zoo
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, introduce, prompt, send

MODEL = "Qwen3NextForCausalLM"
BLOCK = 1056
"""Tokens of a block: attention's block must be as large as a state."""
ATTENTION = 1
"""The index of a layer without a state."""


@pytest.mark.parametrize(
    ("order", "seed"), [("early", 130), pytest.param("together", 131, marks=pytest.mark.exhaustive)]
)
def test_prompts_with_a_shared_prefix(fleet: Fleet, order: Order, seed: int) -> None:
    """P and D hit their caches. KV and states only: bfloat16 rounds D's tokens differently."""
    options = (*zoo.FAMILIES[MODEL].options, ("enable_prefix_caching", True))
    p, d = fleet.get(
        EngineSpec("P-states", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), options, MODEL),
        EngineSpec("D-states", "D", transfer(LAYERWISE), options, MODEL),
    )
    introduce(p, d)
    common, last = prompt(2 * BLOCK + 100, seed=seed), 3
    hits_of_p, hits_of_d = [], []
    for length in (33, BLOCK, BLOCK + 1, BLOCK + 2, 1500, 2 * BLOCK + 1, 2 * BLOCK + 2, 2 * BLOCK + 100):
        last += 1
        handoff = send(p, d, [*common[: length - 1], last], order)
        handoff.outcome()
        push = handoff.push()
        assert push.outcome == "completed"
        assert push.fallback is None or order == "together", "P may have finished first"
        assert handoff.differing_cells() == []
        hits_of_p.append(any(chunk.get("cached") for chunk in push.chunks))
        hits_of_d.append(d.digest(handoff.request_id).cells[ATTENTION][0] is None)
    assert any(hits_of_p)
    assert any(hits_of_d)
