"""Models with layers that do not attend to the whole prompt. P itself gives the right answers."""

from itertools import product

import pytest

from tests.e2e.enginehost import MAX_TOKENS
from tests.e2e.enginespec import LAYERWISE, SCHEDULER_BLOCK_SIZE, STOCK, TRACE, EngineSpec, ModelName, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, check_tokens, prompt, send, started_on_p

WINDOW_CASES: tuple[tuple[int, Order], ...] = (
    (1, "together"), (199, "early"), (200, "late"), (201, "early"), (201, "late"), (257, "together"),
    (480, "early"), (480, "late"), (1100, "early"), (1100, "late"), (1100, "together"),
)  # fmt: skip
CHUNKED_CASES: tuple[tuple[str, Order, tuple[int, ...]], ...] = (
    ("layer", "early", (1, 128, 129, 257, 700, 1024)),
    ("layer", "late", (128, 129, 1024)),
    ("request", "together", (128, 129, 1024)),
)


@pytest.mark.parametrize("connector", [LAYERWISE, pytest.param(STOCK, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("model", [pytest.param("sliding", marks=pytest.mark.exhaustive), "hybrid"])
def test_sliding_window(fleet: Fleet, model: ModelName, connector: str) -> None:
    """D registers only the blocks inside the window of such layers."""
    ours = connector == LAYERWISE
    p_transfer = transfer(LAYERWISE, granularity="layer", trace_dir=TRACE) if ours else transfer(STOCK)
    d_transfer = transfer(LAYERWISE) if ours else transfer(STOCK)
    p, d = fleet.get(
        EngineSpec(f"P-{model}-{connector[:4]}", "P", p_transfer, model=model),
        EngineSpec(f"D-{model}-{connector[:4]}", "D", d_transfer, model=model),
    )
    reference = Reference(p)
    for length, order in WINDOW_CASES:
        handoff = send(p, d, prompt(length, seed=110), order)
        check(handoff.outcome(), reference)
        if ours:
            assert (handoff.push().outcome, handoff.push().swept_layers) == ("completed", 0)
    assert not ours or started_on_p(d), "no answer has started with P's token"


def test_chunked_attention(fleet: Fleet) -> None:
    """Llama-4's local layers attend only to their own chunk of the prompt. D has each block of the last one."""
    p, d = fleet.get(
        EngineSpec("P-chunked", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), model="chunked"),
        EngineSpec("D-chunked", "D", transfer(LAYERWISE), model="chunked"),
    )
    reference = Reference(p)
    for mode, order, lengths in CHUNKED_CASES:
        answers = (1, MAX_TOKENS) if mode == "layer" else (MAX_TOKENS,)  # D computes a single token itself
        for length, max_tokens in product(lengths, answers):
            handoff = send(p, d, prompt(length, seed=112), order, max_tokens=max_tokens, mode=mode)
            check(handoff.outcome(), reference)
            assert handoff.push().outcome == "completed"


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["sliding", "hybrid", "chunked"])
def test_windows_with_larger_blocks_on_p(fleet: Fleet, model: ModelName) -> None:
    """Two blocks of D's window lie in one of P's."""
    larger = (("block_size", 64),)
    p, d = fleet.get(
        EngineSpec(f"P-{model}-64", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), larger, model),
        EngineSpec(f"D-{model}-32", "D", transfer(LAYERWISE), model=model),
    )
    reference = Reference(p)
    for length, order in WINDOW_CASES:
        handoff = send(p, d, prompt(length, seed=113), order)
        check_tokens(handoff.outcome(), reference)
        assert handoff.push().outcome == "completed"


@pytest.mark.parametrize(
    ("p_size", "d_size"),
    [(16, 16), *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in ((64, 32), (32, 64)))],
)
@pytest.mark.parametrize(("order", "lengths"), [("early", (1, 33, 257, 1100)), ("late", (33, 257))])
def test_latent_attention(fleet: Fleet, order: Order, lengths: tuple[int, ...], p_size: int, d_size: int) -> None:
    """MLA keeps one vector per token. KV bytes only: vLLM's CPU prefill and decode paths round it differently."""
    # AMX_MLA, vLLM's choice on some CPUs, takes only multiples of 32
    options = (("load_format", "dummy"), ("dtype", "bfloat16"), ("attention_backend", "CPU_MLA"))
    p_options, d_options = ((*options, (SCHEDULER_BLOCK_SIZE, size)) for size in (p_size, d_size))
    p_transfer = transfer(LAYERWISE, granularity="layer", trace_dir=TRACE)
    p, d = fleet.get(
        EngineSpec(f"P-mla-{p_size}", "P", p_transfer, p_options, "mla"),
        EngineSpec(f"D-mla-{d_size}", "D", transfer(LAYERWISE), d_options, "mla"),
    )
    for length in lengths:
        handoff = send(p, d, prompt(length, seed=111), order)
        handoff.outcome()
        assert handoff.differing_cells() == []
        assert (handoff.push().outcome, handoff.push().swept_layers) == ("completed", 0)
