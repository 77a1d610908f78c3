"""Fences: none where computing is synchronous, pooled device events elsewhere."""

from __future__ import annotations

import time

import pytest
import torch

from layerpush.prefill.fences import FencePool, fences_for

DEADLINE_S = 10.0


def test_a_cpu_needs_no_fence() -> None:
    assert fences_for(torch.device("cpu")) is None


@pytest.mark.gpu
def test_a_fence_passes_only_after_the_stream_reaches_it() -> None:
    device = torch.device("cuda")
    pool = FencePool(device, size=1)
    busy = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    for _ in range(64):
        busy = busy @ busy
    fence = pool.record()
    assert not fence.passed()
    deadline = time.perf_counter() + DEADLINE_S
    while not fence.passed():
        assert time.perf_counter() < deadline
    assert torch.cuda.current_stream().query()


@pytest.mark.gpu
def test_a_recycled_fence_is_reused() -> None:
    pool = FencePool(torch.device("cuda"), size=1)
    first = pool.record()
    second = pool.record()
    assert first is not second
    first.recycle()
    assert pool.record() is first
