"""Everything layerpush knows of vLLM's private names (0.32; 0.33 differs little). No other package may use them.

Facts about the base worker and scheduler are read here and handed on as layerpush's own types.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPushConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

from layerpush.compat.facts import (
    block_sizes,
    cache_layout,
    device_of,
    engine_fallback,
    has_equal_blocks,
    only_decodes,
    runs_in_microbatches,
    slot_views,
    worker_fallback,
)
from layerpush.compat.handshake import agent_of_handshake, handshake_query
from layerpush.compat.metadata import LayerwiseMetadata
from layerpush.compat.prometheus import LayerPushPromMetrics
from layerpush.compat.requests import (
    StagedRegistration,
    awaits_scheduling,
    is_streamed,
    prompt_digest,
    registration_timeout,
    take_staged_registration,
    withdraw_receive,
)
from layerpush.compat.rings import own_ring, peer_ring, register_ring, release_ring
from layerpush.compat.spans import REQUEST_ID, emit_span, traces_requests
from layerpush.compat.stats import HeardStats, LayerPushStats
from layerpush.compat.worker import DEPARTED_KEPT, WatchedPushWorker

__all__ = [
    "DEPARTED_KEPT",
    "GET_META_MSG",
    "REQUEST_ID",
    "HeardStats",
    "LayerPushPromMetrics",
    "LayerPushStats",
    "LayerwiseMetadata",
    "NixlBaseConnector",
    "NixlConnectorMetadata",
    "NixlPushConnector",
    "NixlPushConnectorScheduler",
    "StagedRegistration",
    "WatchedPushWorker",
    "agent_of_handshake",
    "awaits_scheduling",
    "block_sizes",
    "cache_layout",
    "device_of",
    "emit_span",
    "engine_fallback",
    "get_base_request_id",
    "handshake_query",
    "has_equal_blocks",
    "is_streamed",
    "only_decodes",
    "own_ring",
    "peer_ring",
    "prompt_digest",
    "register_ring",
    "registration_timeout",
    "release_ring",
    "runs_in_microbatches",
    "slot_views",
    "take_staged_registration",
    "traces_requests",
    "withdraw_receive",
    "worker_fallback",
]
