"""A connector that pushes wrong KV for one layer. It shows that the tests notice it."""

from typing import Any, Literal

import torch

from bench.demo.faulty import FaultyPushConnector
from tests.e2e.engines import CORRUPTED_LAYER


class Corrupting(FaultyPushConnector):
    """With the damage "wire" it computes right, and writes wrong bytes for `CORRUPTED_LAYER`.

    With "cache" it damages `CORRUPTED_LAYER` in P's own cache before the push: P and D agree, and both are wrong.
    """

    damage: Literal["wire", "cache"] = "wire"

    @property
    def wrong_layer(self) -> int:
        return CORRUPTED_LAYER if self.damage == "wire" else -1

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self.damage == "cache" and f".layers.{CORRUPTED_LAYER}." in layer_name:
            kv_layer.fill_(0.25)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
