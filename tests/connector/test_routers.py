"""Routers' request bodies, as their sources build them, through the front end's check and real schedulers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from layerpush.core.config import LayerPushConfig
from layerpush.core.request_params import check_params
from tests.connector.engine import Engine, holds_prompt
from tests.connector.test_lifecycle import TOKENS, registered, run, step_until

Build = Callable[..., Engine]
HANDSHAKE = 5600
"""The side channel's port in the bodies. A test puts in its engine's port."""

# llm-d-router of August 2026, `--moriio-write-mode --moriio-parallel-dispatch`: runNIXLProtocolV2WriteParallel.
MORIIO_TO_P = """{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
 "remote_block_ids": null, "remote_host": "10.0.0.2", "remote_port": null, "remote_notify_port": 61005,
 "remote_dp_rank": 0, "remote_dp_rank_override": true, "remote_handshake_port": 6301,
 "transfer_id": "tx0c5a5d3e-30ff-4dd7-a6a7-3b2e1b7a0d55", "tp_size": 1, "remote_dp_size": 1}"""
MORIIO_TO_D = """{"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "127.0.0.1:5600",
 "remote_block_ids": [], "remote_host": "127.0.0.1", "remote_port": 5600, "remote_notify_port": 61005,
 "remote_dp_rank": 0, "remote_dp_rank_override": true, "remote_handshake_port": 5600,
 "transfer_id": "tx0c5a5d3e-30ff-4dd7-a6a7-3b2e1b7a0d55", "tp_size": 1, "remote_dp_size": 1}"""

# llm-d-router of November 2026, NIXLPushMode with P's identity known.
PUSH_TO_P = """{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
 "remote_block_ids": null, "remote_host": null, "remote_port": null,
 "transfer_id": "xfer-5d0c1f0a-8c27-4c39-9b7b-0d5f1c3e9a11"}"""
PUSH_TO_D = """{"remote_engine_id": "127.0.0.1:5600", "remote_host": "127.0.0.1", "remote_port": 5600,
 "tp_size": 1, "pp_size": 1, "dcp_size": 1, "transfer_mode": "push", "do_remote_prefill": true,
 "do_remote_decode": false, "remote_request_id": "00000000-0000-0000-0000-000000000003",
 "transfer_id": "xfer-5d0c1f0a-8c27-4c39-9b7b-0d5f1c3e9a11"}"""


def params(body: str, p: Engine) -> dict[str, Any]:
    """A body for these engines: P is started with the ``engine_id`` HOST:PORT, as docs/routers.md says."""
    found: dict[str, Any] = json.loads(body.replace(f":{HANDSHAKE}", f":{p.port}"))
    for key in ("remote_port", "remote_handshake_port"):
        if found.get(key) == HANDSHAKE:
            found[key] = p.port
    if "remote_engine_id" in found and found["do_remote_prefill"]:
        found["remote_engine_id"] = p.engine_id
    return found


@pytest.mark.parametrize(
    ("to_p", "to_d"), [(MORIIO_TO_P, MORIIO_TO_D), (PUSH_TO_P, PUSH_TO_D)], ids=["moriio", "NIXLPushMode"]
)
@pytest.mark.parametrize("ids", ["one id", "an id for each"])
def test_p_pushes_by_layer_when_llm_d_asks_both_engines_at_once(engine: Build, to_p: str, to_d: str, ids: str) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    for_p, for_d = params(to_p, p), params(to_d, p)
    check_params(for_p, "kv_producer", LayerPushConfig())
    check_params(for_d, "kv_consumer", LayerPushConfig())
    p_id, d_id = "cmpl-one-0-01234567", "cmpl-one-0-89abcdef"
    if ids == "an id for each":
        d_id = "cmpl-another-0-89abcdef"
    d.add(d_id, TOKENS, for_d, max_tokens=2)
    d.step()
    blocks = d.blocks(d_id)
    registered(p)
    p.add(p_id, TOKENS, for_p)
    run(p, 4)
    step_until(p, d, done=lambda: d_id in d.received and p_id in p.sent)
    assert holds_prompt(d, blocks, TOKENS)
    assert p.totals.outcomes == {"completed": 1}
    assert p.totals.fallbacks == {}
