"""Public names of vLLM's NIXL connectors that other folders subclass or call."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPushConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

__all__ = [
    "GET_META_MSG",
    "NixlBaseConnector",
    "NixlConnectorMetadata",
    "NixlPushConnector",
    "get_base_request_id",
]
