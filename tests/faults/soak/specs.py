"""The line-ups of the soak: engines with small caches, short deadlines and both answers to a failed load."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.e2e.engines import CORRUPTING_MODULE, PREFIX_CACHING
from tests.e2e.enginespec import LAYERWISE, STOCK, TRACE, EngineSpec, FailedLoad, ModelName, beside_store
from tests.faults.soak.kinds import Kind, Place

PEER_TIMEOUT_S = 4
WRITE_TIMEOUT_S = 6
LEASE_S = 12
REGISTRATION_TIMEOUT_S = 15
UNKNOWN_S = 10
"""D keeps a late answer for another 30 s, and the audit waits for 60 s."""
TURN_S = 12
MAX_MODEL_LEN = 1400

SETTINGS = {
    "verify": 1.0,
    "peer_timeout_s": PEER_TIMEOUT_S,
    "write_timeout_s": WRITE_TIMEOUT_S,
    "kv_lease_duration": LEASE_S,
    "push_registration_timeout": REGISTRATION_TIMEOUT_S,
    "unknown_request_timeout_s": UNKNOWN_S,
    "bidirectional_kv_xfer": True,
    "decoder_kv_blocks_ttl": TURN_S,
}
Options = tuple[tuple[str, Any], ...]
# 2,240 tokens at most: two long prompts cannot be in memory at once, so P preempts.
TIGHT: Options = (("num_gpu_blocks_override", 70), ("scheduler_reserve_full_isl", False))
LENGTH: Options = (("max_model_len", MAX_MODEL_LEN),)
P_OPTIONS: tuple[Options, ...] = (
    (*PREFIX_CACHING, ("max_num_batched_tokens", 150), *TIGHT),
    (("max_num_batched_tokens", 256), ("num_gpu_blocks_override", 120)),
)
D_OPTIONS: tuple[Options, ...] = (
    (*PREFIX_CACHING, ("num_gpu_blocks_override", 160)),
    (("num_gpu_blocks_override", 110),),
)
POLICIES: tuple[FailedLoad, FailedLoad] = ("recompute", "fail")
LOSSES = 0.1
"""The part of its loads that lose a block, of a store beside layerpush."""
EVERYWHERE: tuple[Place, ...] = ("request", "engine", "wire")


@dataclass(frozen=True)
class LineUp:
    """Two prefill engines, two decode engines and a plain one.

    ``prefills``: each P's own ``kv_connector_extra_config``. ``options`` go to all engines. Faults strike only at
    ``places``. ``reads_kv``: this process can read the engines' KV. ``stock``: the second P and the first D are vLLM's
    own. ``neighbours``: each engine has a store beside layerpush. The first P and D recompute lost blocks, the second
    ones fail the request.
    """

    name: str
    meaning: str
    prefills: tuple[dict[str, Any], dict[str, Any]] = ({"granularity": "layer"}, {"granularity": "auto"})
    model: ModelName = "llama"
    p_options: tuple[Options, ...] = P_OPTIONS
    d_options: tuple[Options, ...] = D_OPTIONS
    options: Options = ()
    places: tuple[Place, ...] = EVERYWHERE
    reads_kv: bool = True
    stock: bool = False
    neighbours: bool = False

    def specs(self, engines: int, *, corrupt: bool) -> list[EngineSpec]:
        """So many Ps, as many Ds, and the plain engine R. ``corrupt``: each P of ours writes one layer wrong,
        and D does not verify it.
        """
        ours = {"kv_connector": LAYERWISE}
        wrong = {"kv_connector": "Corrupting", "kv_connector_module_path": CORRUPTING_MODULE}
        specs = []
        for number, extra in enumerate(self.prefills[:engines]):
            if self.stock and number == 1:
                transfer = json.dumps({"kv_connector": STOCK})
            else:
                policy = {"kv_load_failure_policy": POLICIES[number]} if self.neighbours else {}
                fields, unverified = (wrong, {"verify": 0}) if corrupt else (ours, {})
                transfer = _transfer(fields | policy, trace_dir=TRACE, **extra, **unverified)
            if self.neighbours:
                way = ("sync", "layer")[number]
                transfer = beside_store(transfer, "kv_producer", first=number == 0, way=way, losses=LOSSES)
            options = (*LENGTH, *self.p_options[number], *self.options)
            specs.append(EngineSpec(f"P{number + 1}", "P", transfer, options, self.model))
        for number, on_failed_load in enumerate(POLICIES[:engines]):
            if self.stock and number == 0:
                transfer = json.dumps({"kv_connector": STOCK})
            else:
                transfer = _transfer(ours | {"kv_load_failure_policy": on_failed_load})
            if self.neighbours:
                way = ("async", "sync")[number]
                transfer = beside_store(transfer, "kv_consumer", first=number == 0, way=way, losses=LOSSES)
            options = (*LENGTH, *self.d_options[number], *self.options)
            specs.append(EngineSpec(f"D{number + 1}", "D", transfer, options, self.model))
        return [*specs, EngineSpec("R", "R", None, (*LENGTH, *self.options), self.model)]

    def kinds(self, asked: Iterable[Kind]) -> tuple[Kind, ...]:
        """The kinds of ``asked`` that strike in this line-up."""
        return tuple(kind for kind in asked if kind.place in self.places and (self.reads_kv or not kind.inside))


PLAIN = LineUp("plain", "one P writes each layer by itself, the other merges them just in time")
LINE_UPS = (
    PLAIN,
    LineUp("gathered", "one P gathers all its WRITEs, the other chooses", ({"packing": "gather"}, {"packing": "auto"})),
    LineUp("whole", "one P pushes whole requests, the other chunks", ({"layerwise": False}, {"granularity": "chunk"})),
    LineUp("windows", "every other layer has a sliding window", model="hybrid"),
    LineUp(
        "states",
        "every other layer has a Mamba-2 state",
        model="GraniteMoeHybridForCausalLM",
        p_options=((("max_num_batched_tokens", 150),), (("max_num_batched_tokens", 256),)),
        d_options=((), ()),
    ),
    LineUp(
        "ranks",
        "two tensor parallel ranks on each side; no faults of wires, tokens only",
        options=(("tensor_parallel_size", 2),),
        places=("request", "engine"),
        reads_kv=False,
    ),
    LineUp(
        "neighbours",
        "each engine has a store beside layerpush, which loads blocks of known prompts and loses some; small caches",
        # vLLM leaves a lost block in its prefix cache if its request is preempted or aborted before it is recomputed.
        p_options=(
            (("max_num_batched_tokens", 150), *TIGHT),
            (*PREFIX_CACHING, ("max_num_batched_tokens", 256), ("num_gpu_blocks_override", 80)),
        ),
        d_options=((("num_gpu_blocks_override", 100),), (*PREFIX_CACHING, ("num_gpu_blocks_override", 100))),
        neighbours=True,
    ),
    LineUp("stock", "one P and one D are stock; no faults, which stock does not survive", places=(), stock=True),
)


def _transfer(fields: dict[str, str], **extra: Any) -> str:
    return json.dumps(fields | {"kv_connector_extra_config": SETTINGS | extra}, sort_keys=True)
