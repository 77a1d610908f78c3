"""Checks of a push's trace, so that a silent fallback to whole push fails a test."""

import math

from tests.e2e.engines import KV_BYTES_PER_BLOCK_AND_LAYER
from tests.e2e.enginespec import BLOCK_SIZE, PREFILL_TOKENS_PER_STEP
from tests.e2e.handoff import Handoff
from tests.e2e.models import LAYERS
from tests.e2e.pushtrace import Push


def check_completed(
    push: Push, tokens: int, *, chunks: int | None = None, pushed_blocks: int | None = None, cached: bool = False
) -> None:
    """Check a finished push of any mode by an eager engine: all layers hooked, every byte sent once and landed.

    `chunks` that P computed defaults to those of a prompt alone on P, `pushed_blocks` to the whole prompt. `cached`:
    the prompt begins with a chunk from P's prefix cache.
    """
    chunks = math.ceil(tokens / PREFILL_TOKENS_PER_STEP) if chunks is None else chunks
    blocks = math.ceil(tokens / BLOCK_SIZE) if pushed_blocks is None else pushed_blocks
    assert push.outcome == "completed"
    assert push.tokens == tokens
    assert (push.hooked_layers, push.swept_layers) == (chunks * LAYERS, 0)
    chunks += cached
    assert [chunk["cached"] for chunk in push.chunks] == [cached and not index for index in range(chunks)]
    assert push.layer_chunks == {(chunk, layer) for chunk in range(chunks) for layer in range(LAYERS)}
    assert push.chunks[0]["start_block"] == 0
    assert push.chunks[-1]["end_block"] == math.ceil(tokens / BLOCK_SIZE)
    assert all(one["end_block"] == two["start_block"] for one, two in zip(push.chunks, push.chunks[1:], strict=False))
    assert sum(write["bytes"] for write in push.writes) == blocks * LAYERS * KV_BYTES_PER_BLOCK_AND_LAYER
    for write in push.writes:
        assert write["t_post"] <= write["t_posted"] <= write["t_landed"] <= push.t_last_landed
    assert push.t_first_planned < push.t_last_ready <= push.t_last_landed


def check_streamed(handoff: Handoff, *, mode: str = "layer", chunks: int | None = None) -> Push:
    """Check that the push left during prefill, layer by layer. Returns the push."""
    push = handoff.push()
    assert (push.mode, push.fallback) == (mode, None)
    check_completed(push, len(handoff.token_ids), chunks=chunks)
    assert push.t_last_landed <= push.t_notified
    assert push.writes_before_last_ready > 0, "nothing was written while prefill was computing"
    return push
