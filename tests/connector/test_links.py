"""Whether a push between two engines can be right, by the facts of their handshake."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize(
    ("block_size", "ranks", "mamba", "reason"),
    [
        (32, 2, False, None),
        (32, 2, True, None),
        (64, 2, False, "its block size is 64 tokens, ours 32"),
        (16, 2, False, "its block size is 16 tokens, ours 32"),
        (48, 2, False, "its block size is 48 tokens, ours 32"),
        (32, 1, False, None),
        (32, 1, True, "it has 1 tensor parallel ranks, we 2, and a model with Mamba layers needs as many"),
        (32, 4, True, "it has 4 tensor parallel ranks, we 2, and a model with Mamba layers needs as many"),
    ],
)
def test_a_mismatch_of_two_engines_has_a_reason(block_size: int, ranks: int, mamba: bool, reason: str | None) -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from layerpush.compat.links import mismatch

    remote = SimpleNamespace(remote_block_size=block_size, remote_tp_size=ranks)
    topology = SimpleNamespace(tp_size=2, get_engine_info={"other": remote}.__getitem__)
    group = KVCacheGroupSpec(["state"], MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float16,)))
    cache = KVCacheConfig(8, [], [group] if mamba else [])
    worker = SimpleNamespace(transfer_topo=topology, block_size=32, kv_cache_config=cache)
    found = mismatch(worker, "other")  # type: ignore[arg-type]
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)
