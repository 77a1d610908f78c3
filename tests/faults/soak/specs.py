"""The engines of the soak: small caches, short deadlines, both answers to a failed load."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.engines import CORRUPTING_MODULE
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec

PEER_TIMEOUT_S = 4
WRITE_TIMEOUT_S = 6
LEASE_S = 12
REGISTRATION_TIMEOUT_S = 15
MAX_MODEL_LEN = 1400

DEADLINES = {
    "peer_timeout_s": PEER_TIMEOUT_S,
    "write_timeout_s": WRITE_TIMEOUT_S,
    "kv_lease_duration": LEASE_S,
    "push_registration_timeout": REGISTRATION_TIMEOUT_S,
}
CACHING = ("enable_prefix_caching", True)
# 2,240 tokens at most: two long prompts cannot be in memory at once, so P preempts.
TIGHT = (("num_gpu_blocks_override", 70), ("scheduler_reserve_full_isl", False))
LENGTH = ("max_model_len", MAX_MODEL_LEN)


def prefills(count: int, *, corrupt: bool) -> list[EngineSpec]:
    """Ps that differ in how they write: layer by layer, and just in time."""
    connector = {"kv_connector": LAYERWISE}
    if corrupt:
        connector = {"kv_connector": "SendsWrongLayer", "kv_connector_module_path": CORRUPTING_MODULE}
    variants = (
        ("layer", (CACHING, LENGTH, ("max_num_batched_tokens", 150), *TIGHT)),
        ("auto", (LENGTH, ("max_num_batched_tokens", 256), ("num_gpu_blocks_override", 120))),
    )
    return [
        EngineSpec(f"P{number + 1}", "P", _transfer(connector, granularity=granularity, trace_dir=TRACE), options)
        for number, (granularity, options) in enumerate(variants[:count])
    ]


def decoders(count: int) -> list[EngineSpec]:
    """Ds that recompute missing blocks, and Ds that fail such a request. They have few blocks, for frequent reuse."""
    connector = {"kv_connector": LAYERWISE}
    variants = (
        ("recompute", (CACHING, LENGTH, ("num_gpu_blocks_override", 160))),
        ("fail", (LENGTH, ("num_gpu_blocks_override", 110))),
    )
    return [
        EngineSpec(f"D{number + 1}", "D", _transfer(connector | {"kv_load_failure_policy": policy}), options)
        for number, (policy, options) in enumerate(variants[:count])
    ]


REFERENCE = EngineSpec("R", "R", None, (LENGTH,))


def _transfer(fields: dict[str, str], **extra: Any) -> str:
    return json.dumps(fields | {"kv_connector_extra_config": DEADLINES | extra}, sort_keys=True)
