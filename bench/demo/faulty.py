"""A connector that pushes wrong KV. It shows that checks notice wrong KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from layerpush.connector import LayerwisePushConnector


class FaultyPushConnector(LayerwisePushConnector):
    """Computes right, but writes the next layer's bytes where ``wrong_layer`` belongs on D, if it gathers nothing.

    P's own cache and tokens stay right, as with a wrong descriptor id. Named by ``kv_connector`` with
    ``kv_connector_module_path`` set to this module.
    """

    @property
    def wrong_layer(self) -> int:
        """Counted as P's blocks are, in descriptor order."""
        return 0

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """``kv_caches``: ``[blocks, heads, block_size, 2 * head_dim]`` each. Main thread."""
        super().register_kv_caches(kv_caches)
        assert self.connector_worker is not None
        agent = self.connector_worker.nixl_wrapper
        prepare = agent.make_prepped_xfer
        blocks = next(iter(kv_caches.values())).shape[0]

        def prepare_wrong(
            operation: str, local_list: Any, local: Any, remote_list: Any, remote: Any, **options: Any
        ) -> Any:
            ids = np.asarray(local)
            wrong = np.where(ids // blocks == self.wrong_layer, ids + blocks, ids).astype(np.int32)
            return prepare(operation, local_list, wrong, remote_list, remote, **options)

        agent.make_prepped_xfer = prepare_wrong
