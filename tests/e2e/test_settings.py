"""Settings of vLLM that change the KV cache, the steps or the requests: D has P's KV and a plain engine's tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from layerpush.core.transfer_config import BY_PATH
from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Outcome, Reference, check, check_tokens, introduce, new_id, prompt, send

LENGTHS = (1, 33, 257, 700)
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'

SETTINGS: dict[str, tuple[tuple[str, Any], ...]] = {
    "fp8 KV": (("kv_cache_dtype", "fp8_e4m3"),),
    "blocks of 64": (("block_size", 64),),
    "priorities": (("scheduling_policy", "priority"),),
    "LoRA": (("enable_lora", True),),
    "n-grams": (("speculative_config", NGRAM),),
    "embeddings": (("enable_prompt_embeds", True),),
    "images": (("skip_tokenizer_init", False),),
}
MODELS = {"LoRA": "lora", "images": "images"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", SETTINGS)
def test_setting(fleet: Fleet, setting: str) -> None:
    p, d, plain = hosts(fleet, setting)
    check_pushes(p, d, Reference(plain))


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", ["LoRA", "embeddings", "images"])
def test_equal_tokens_may_be_another_prompt(fleet: Fleet, setting: str) -> None:
    """Two requests have one id, and differ in their adapter, their embeddings or their image only."""
    p, d, plain = hosts(fleet, setting)
    introduce(p, d)
    tokens, answers = prompt(257, seed=131), set()
    for variant in (1, 0):
        for host in (p, d, plain):
            host.call(probes.choose, variant)
        outcome = send(p, d, tokens, "early").outcome()
        check(outcome, Reference(plain))
        answers.add(outcome.d_tokens)
    assert len(answers) == 2
    handoff = Handoff(new_id(), tokens, p, d)
    d.call(probes.choose, 1)
    d.add(handoff.to_d())
    handoff.await_registration()
    p.add(handoff.to_p())
    assert d.wait_output(handoff.request_id).finish_reason == "error"
    assert any(handoff.request_id in line and "another prompt" in line for line in d.log().splitlines())
    d.call(probes.choose, 0)
    d.add(handoff.to_d())
    check(handoff.outcome(), Reference(plain))


def hosts(fleet: Fleet, setting: str) -> list[EngineHost]:
    """P, D and a plain engine with this setting."""
    options, model = SETTINGS[setting], MODELS.get(setting, "llama")
    return fleet.get(
        EngineSpec("P-set", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), options, model),
        EngineSpec("D-set", "D", transfer(LAYERWISE), options, model),
        EngineSpec("R-set", "R", None, options, model),
    )


# "eager" captures graphs and generates no C++.
P_NAMED = EngineSpec(
    "P-named",
    "P",
    transfer("NixlConnector", module_path=BY_PATH, granularity="layer", trace_dir=TRACE),
    (("enforce_eager", False), ("compilation_config", '{"mode": 2, "backend": "eager"}')),
)
P_INDUCTOR = EngineSpec(
    "P-inductor",
    "P",
    transfer(LAYERWISE, granularity="layer", trace_dir=TRACE),
    (("enforce_eager", False),),
)


@pytest.mark.parametrize(
    "p_spec", [P_NAMED, pytest.param(P_INDUCTOR, marks=pytest.mark.exhaustive)], ids=["eager", "inductor"]
)
def test_compiled_prefill(fleet: Fleet, reference: Reference, p_spec: EngineSpec) -> None:
    """`torch.compile` does not compile attention, so the hook stays."""
    p, d = fleet.get(p_spec, engines.D_LAYER)
    assert p.call(probes.compiled_graphs) > 0
    check_pushes(p, d, reference)


def test_the_connector_names_of_vllm(fleet: Fleet, reference: Reference) -> None:
    """Dynamo, SMG and Ray Serve know only `NixlConnector` and `NixlPushConnector`."""
    p, d = fleet.get(P_NAMED, EngineSpec("D-named", "D", transfer("NixlPushConnector", module_path=BY_PATH)))
    check_pushes(p, d, reference)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(32, 32), (32, 64)])
def test_both_roles(fleet: Fleet, reference: Reference, sizes: tuple[int, int]) -> None:
    """Each engine prefills for the other one. Only blocks of one size have the same bytes on both sides."""
    both = transfer(LAYERWISE, kv_role="kv_both", granularity="layer", trace_dir=TRACE)
    pair = fleet.get(*(EngineSpec(f"B{n}-{size}", "P", both, (("block_size", size),)) for n, size in enumerate(sizes)))
    for p, d in (pair, reversed(pair)):
        check_pushes(p, d, reference, check if len({*sizes}) == 1 else check_tokens)


def check_pushes(
    p: EngineHost, d: EngineHost, reference: Reference, answer: Callable[[Outcome, Reference], None] = check
) -> None:
    """Check that pushes by layer are right, for prompts around the ends of blocks and chunks."""
    introduce(p, d)
    for length in LENGTHS:
        handoff = send(p, d, prompt(length, seed=130), "early")
        answer(handoff.outcome(), reference)
        push = handoff.push()
        assert (push.outcome, push.fallback, push.swept_layers) == ("completed", None, 0)
