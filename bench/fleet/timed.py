"""A prefill engine whose layers take a set time."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from bench.fleet.presets import LAYER_TOKEN_S
from layerpush.connector import LayerwisePushConnector


class TimedPushConnector(LayerwisePushConnector):
    """Each layer takes ``LAYER_TOKEN_S`` for each token of the step, if it computes no longer than that. The engine
    sleeps for the rest, as a host waits for its device. So four engines fit onto two cores.
    """

    _until = 0.0

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._until = time.perf_counter()

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer is computed; the hook follows when it is due."""
        self._until += LAYER_TOKEN_S * attn_metadata.num_actual_tokens
        time.sleep(max(0.0, self._until - time.perf_counter()))
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
