"""The engines of the fault tests: short deadlines, and caches small enough that a block let go too early is reused."""

from typing import Any

from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, FailedLoad, transfer

PEER_TIMEOUT_S = 4
WRITE_TIMEOUT_S = 4
LEASE_S = 2
REGISTRATION_TIMEOUT_S = 4
# Seconds that a test allows on top of a deadline, for a busy machine.
GRACE_S = 10.0

SMALL_CACHE = (("max_model_len", 2560), ("num_gpu_blocks_override", 160), ("scheduler_reserve_full_isl", False))


def _prefill(name: str, **extra: Any) -> EngineSpec:
    fields: dict[str, Any] = {"min_write_bytes": 0, "trace_dir": TRACE, "peer_timeout_s": PEER_TIMEOUT_S}
    return EngineSpec(name, "P", transfer(LAYERWISE, **(fields | extra)))


def _decode(name: str, policy: FailedLoad, **extra: Any) -> EngineSpec:
    fields = {"peer_timeout_s": PEER_TIMEOUT_S} | extra
    return EngineSpec(name, "D", transfer(LAYERWISE, on_failed_load=policy, **fields), SMALL_CACHE)


P = _prefill("P-faults")
P_IMPATIENT = _prefill("P-impatient", write_timeout_s=WRITE_TIMEOUT_S)
P_SHORT_LEASE = _prefill("P-short-lease", kv_lease_duration=LEASE_S)
P_TIGHT = EngineSpec(
    "P-tight-lease",
    "P",
    transfer(LAYERWISE, min_write_bytes=0, trace_dir=TRACE, kv_lease_duration=LEASE_S, peer_timeout_s=PEER_TIMEOUT_S),
    (("max_model_len", 2560), ("num_gpu_blocks_override", 90), ("scheduler_reserve_full_isl", False)),
)
D = _decode("D-recompute", "recompute")
D_FAIL = _decode("D-fail", "fail")
D_HASTY = _decode("D-hasty", "recompute", push_registration_timeout=REGISTRATION_TIMEOUT_S)
DECODERS = (D, D_FAIL)
