"""kv_transfer_params that no router should send. Pure."""

from __future__ import annotations

import random
from typing import Any

FOR_D: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("remote_engine_id", (None, 7, "", "x" * 5000, ["P1-1"], "nobody-of-that-name")),
    ("remote_host", (None, 7, "", "no such host", "127.0.0.1\x00", "999.1.1.1", "192.0.2.1", ["127.0.0.1"])),
    ("remote_port", (None, 0, -1, 65536, 10**30, "26000", 1, 2.5, [26000])),
    ("remote_request_id", (None, 7, "", {}, "x" * 5000)),
    ("tp_size", (None, 0, -1, 3, 10**9, "1", 1.5, [])),
    ("pp_size", (0, -2, "1", 10**9, {})),
)
FOR_P: tuple[tuple[str, Any], ...] = (
    ("do_remote_decode", "yes"),
    ("do_remote_decode", 1),
    ("do_remote_decode", [True]),
    ("do_remote_prefill", True),
    ("do_remote_prefill", "no"),
    ("remote_block_ids", "all"),
    ("remote_engine_id", 7),
    ("remote_port", "26000"),
    ("remote_num_tokens", -1),
    ("remote_prefixes", ["all"]),
)


def damaged_for_d(params: dict[str, Any], draw: float) -> dict[str, Any]:
    """``params`` without a key, or with an impossible value."""
    rng = random.Random(draw)
    key, values = rng.choice(FOR_D)
    damaged = dict(params)
    if rng.random() < 0.3:
        del damaged[key]
    else:
        damaged[key] = rng.choice(values)
    return damaged


def damaged_for_p(params: dict[str, Any], draw: float) -> dict[str, Any]:
    key, value = random.Random(draw).choice(FOR_P)
    return {**params, key: value}
