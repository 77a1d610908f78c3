"""Every architecture of the zoo: D's KV and states are P's, and D's tokens are those of P alone."""

import pytest

from tests.e2e import zoo
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference, introduce, prompt, send
from tests.e2e.test_settings import NGRAM

LENGTHS = (2, 33, 200, 256, 700)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", zoo.FAMILIES)
def test_pushes(fleet: Fleet, architecture: str) -> None:
    family = zoo.FAMILIES[architecture]
    p, d = fleet.get(
        EngineSpec(
            "P-zoo", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), family.options, architecture
        ),
        EngineSpec("D-zoo", "D", transfer(LAYERWISE), family.options, architecture),
    )
    introduce(p, d)
    plain = Reference(p)
    for length in LENGTHS:
        handoff = send(p, d, prompt(length, seed=120), "early")
        outcome = handoff.outcome()
        push = handoff.push()
        assert (push.outcome, push.fallback) == ("completed", None)
        assert push.swept_layers == family.states * len(push.chunks)
        assert handoff.differing_cells() == []
        if family.tokens:
            assert outcome.d_tokens == plain.tokens(handoff.token_ids)


@pytest.mark.exhaustive
def test_states_beside_drafts(fleet: Fleet) -> None:
    """No tokens: behind a state with drafts, those of vLLM's CPU build alone differ from run to run."""
    options, model = (("speculative_config", NGRAM),), "FalconH1ForCausalLM"
    p, d = fleet.get(
        EngineSpec("P-drafts", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), options, model),
        EngineSpec("D-drafts", "D", transfer(LAYERWISE), options, model),
    )
    introduce(p, d)
    for length in LENGTHS:
        handoff = send(p, d, prompt(length, seed=121), "early")
        handoff.outcome()
        assert (handoff.push().outcome, handoff.push().fallback) == ("completed", None)
        assert handoff.differing_cells() == []
