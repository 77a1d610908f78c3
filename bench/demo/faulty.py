"""A connector that pushes wrong KV. It shows that the demo notices wrong KV."""

from __future__ import annotations

import re
from typing import Any

import torch

from layerpush.connector import LayerwisePushConnector

CORRUPTED_LAYER = 0
CORRUPTED_VALUE = 0.25


class FaultyPushConnector(LayerwisePushConnector):
    """Overwrites all KV of one layer before it is pushed; the other layers stay as computed.

    It is the first layer, because every model has one.

    Named by ``kv_connector`` with ``kv_connector_module_path`` set to this module. For the demo's negative control.
    """

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Damage ``kv_layer`` (``[blocks, heads, block_size, 2 * head_dim]``) in place, then push as usual."""
        number = re.search(r"\.layers\.(\d+)\.", layer_name)
        if number and int(number.group(1)) == CORRUPTED_LAYER:
            kv_layer.fill_(CORRUPTED_VALUE)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
