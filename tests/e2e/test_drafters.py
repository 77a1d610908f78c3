"""Drafters with KV of their own: D has it, and drafts what P would draft."""

import json

import pytest

from tests.e2e import probes
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference, introduce, prompt, send
from tests.e2e.models import DRAFTER

# One token: P would compute a second one after the push, behind the prompt but in its last block.
DRAFTERS = {
    "eagle": {"method": "eagle", "model": f"$MODEL/{DRAFTER}", "num_speculative_tokens": 1},
    "draft model": {"method": "draft_model", "model": "$MODEL", "num_speculative_tokens": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    "gemma-4": {"method": "mtp", "model": f"$MODEL/{DRAFTER}", "num_speculative_tokens": 1},
}
MODELS = {"mtp": "mtp", "gemma-4": "Gemma4ForCausalLM"}
LENGTHS = (1, 33, 256, 700)
"""For the third, vLLM has one more block on P than the prompt needs: for the draft."""


@pytest.mark.parametrize(
    "drafter",
    ["eagle", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in DRAFTERS if name != "eagle")],
)
def test_kv_of_a_drafter(fleet: Fleet, drafter: str) -> None:
    options, model = (("speculative_config", json.dumps(DRAFTERS[drafter])),), MODELS.get(drafter, "eagle")
    p, d = fleet.get(
        EngineSpec(f"P-{drafter}", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), options, model),
        EngineSpec(f"D-{drafter}", "D", transfer(LAYERWISE), options, model),
    )
    introduce(p, d)
    for host in (p, d):
        host.call(probes.record_drafts)
    for mode in ("layer", "request"):
        for length in LENGTHS:
            reference = Reference(p)
            tokens = reference.tokens(prompt(length, seed=140))
            expected = p.call(probes.take_drafts)
            handoff = send(p, d, prompt(length, seed=140), "early", mode=mode)
            assert handoff.outcome().d_tokens == tokens
            assert handoff.differing_cells() == []
            drafts = d.call(probes.take_drafts)
            assert drafts == expected[-len(drafts) :]
            push = handoff.push()
            assert (push.outcome, push.mode, push.swept_layers) == ("completed", mode, 0)
            p.call(probes.take_drafts)
