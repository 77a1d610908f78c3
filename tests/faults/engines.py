"""The engines of the fault tests: short deadlines, and small caches, so that blocks freed too early are reused.

Every P has the default granularity, "auto": its WRITEs carry one layer each until `checks.warm_up`, and several then.
"""

import dataclasses
import json
from typing import Any, Literal

import pytest

from tests.e2e.engines import TIGHT_CACHE
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, FailedLoad, transfer

Packing = Literal["auto", "gather"]

PEER_TIMEOUT_S = 5
WRITE_TIMEOUT_S = 4
LEASE_S = 2
REGISTRATION_TIMEOUT_S = 6
UNKNOWN_S = 3
# Seconds that a test allows on top of a deadline, for a busy machine.
GRACE_S = 15.0

SMALL_CACHE = (("max_model_len", 2560), ("num_gpu_blocks_override", 160), ("scheduler_reserve_full_isl", False))


def _prefill(name: str, **extra: Any) -> EngineSpec:
    fields: dict[str, Any] = {"trace_dir": TRACE, "peer_timeout_s": PEER_TIMEOUT_S}
    return EngineSpec(name, "P", transfer(LAYERWISE, **(fields | extra)))


def _decode(name: str, policy: FailedLoad, **extra: Any) -> EngineSpec:
    fields = {"peer_timeout_s": PEER_TIMEOUT_S} | extra
    return EngineSpec(name, "D", transfer(LAYERWISE, on_failed_load=policy, **fields), SMALL_CACHE)


P = _prefill("P-faults")
P_IMPATIENT = _prefill("P-impatient", write_timeout_s=WRITE_TIMEOUT_S)
P_SHORT_LEASE = _prefill("P-short-lease", kv_lease_duration=LEASE_S)
P_SMALL = dataclasses.replace(_prefill("P-small"), options=TIGHT_CACHE)
P_TIGHT = dataclasses.replace(
    _prefill("P-tight", kv_lease_duration=LEASE_S, unknown_request_timeout_s=UNKNOWN_S), options=TIGHT_CACHE
)
ROOM_FOR_ONE = (("max_model_len", 1056), ("num_gpu_blocks_override", 40))
"""Blocks for one prompt of 1,000 tokens."""
P_FULL = dataclasses.replace(_prefill("P-full", kv_lease_duration=4), options=ROOM_FOR_ONE)
P_NEAR = _prefill("P-near", allowed_hosts=["127.0.0.1"])
P_ELSEWHERE = _prefill("P-elsewhere", allowed_hosts=["192.0.2.1"])
D = _decode("D-recompute", "recompute")
D_FAIL = _decode("D-fail", "fail")
KEEPS = (*SMALL_CACHE, ("enable_prefix_caching", True))
D_KEEPS = dataclasses.replace(_decode("D-keeps", "recompute"), options=KEEPS)
D_FAIL_KEEPS = dataclasses.replace(_decode("D-fail-keeps", "fail"), options=KEEPS)
D_HASTY = _decode("D-hasty", "recompute", push_registration_timeout=REGISTRATION_TIMEOUT_S)
DECODERS = (D, D_FAIL)
P_VICTIM, D_VICTIM = (dataclasses.replace(spec, name=f"{spec.name}-victim") for spec in (P, D))
"""Tests end these. One that has ended is replaced, and one that has survived serves the next test."""
FULL_DECODERS = tuple(
    dataclasses.replace(_decode(f"{d.name}-full", policy), options=ROOM_FOR_ONE)
    for d, policy in ((D, "recompute"), (D_FAIL, "fail"))
)

PLANS = {"gather": "gathered"}


def for_test_all(*values: Any) -> Any:
    """One row of parameters that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


PACKINGS = ("auto", for_test_all("gather"))


def with_packing(spec: EngineSpec, packing: Packing) -> EngineSpec:
    """``spec`` with this packing for every WRITE of a push by layer. "auto": unchanged."""
    if packing == "auto":
        return spec
    assert spec.transfer is not None
    fields = json.loads(spec.transfer)
    fields["kv_connector_extra_config"]["packing"] = packing
    forced = dataclasses.replace(spec, name=f"{spec.name}-{packing}", transfer=json.dumps(fields, sort_keys=True))
    assert forced_plan(forced) == PLANS[packing], "check_planned would check nothing"
    return forced


def forced_plan(spec: EngineSpec) -> str | None:
    """The plan of every WRITE of a push by layer; None if the engine chooses."""
    fields = json.loads(spec.transfer or "{}").get("kv_connector_extra_config", {})
    return PLANS.get(fields.get("packing"))
