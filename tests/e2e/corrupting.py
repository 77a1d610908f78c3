"""A connector that pushes wrong KV for one layer. It shows that the tests notice it."""

from typing import Any, Literal

import numpy as np
import torch

from layerpush.connector import LayerwisePushConnector
from tests.e2e.engines import CORRUPTED_LAYER


class Corrupting(LayerwisePushConnector):
    """With the damage "wire" it computes right, but writes the next layer's bytes where `CORRUPTED_LAYER` belongs on D.
    P's own cache and tokens stay right, as with a wrong descriptor id.

    With "cache" it damages `CORRUPTED_LAYER` in P's own cache before the push: P and D agree, and both are wrong.
    """

    damage: Literal["wire", "cache"] = "wire"

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self.connector_worker is not None
        agent = self.connector_worker.nixl_wrapper
        prepare = agent.make_prepped_xfer
        blocks = next(iter(kv_caches.values())).shape[0]

        def prepare_wrong(
            operation: str, local_list: Any, local: Any, remote_list: Any, remote: Any, **options: Any
        ) -> Any:
            ids = np.asarray(local)
            if self.damage == "wire":
                ids = np.where(ids // blocks == CORRUPTED_LAYER, ids + blocks, ids).astype(np.int32)
            return prepare(operation, local_list, ids, remote_list, remote, **options)

        agent.make_prepped_xfer = prepare_wrong

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self.damage == "cache" and f".layers.{CORRUPTED_LAYER}." in layer_name:
            kv_layer.fill_(0.25)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
