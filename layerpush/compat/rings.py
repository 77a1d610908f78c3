"""Staging rings as NIXL memory, beside the KV cache that vLLM registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker


def register_ring(worker: NixlPushConnectorWorker, base: int, size: int, device: int) -> None:
    """Register a ring of ``size`` bytes with NIXL, before the KV cache: a handshake describes both to a peer.

    ``device`` is the device's number: the worker's ``device_id`` is 0 until the cache is registered.
    """
    descriptors = worker.nixl_wrapper.get_reg_descs([(base, size, device, "")], worker.nixl_memory_type)
    worker.nixl_wrapper.register_memory(descriptors, backends=worker.nixl_backends)
    worker._registered_descs.append(descriptors)


def own_ring(worker: NixlPushConnectorWorker, base: int, size: int, element: int) -> Any:
    """NIXL's prepared list of our ring: descriptors of ``element`` bytes each, without a remainder at the end."""
    # NIXL's strided form: one row of address, bytes, device, stride and count
    rows = np.asarray([[base, element, worker.device_id, element, size // element]], dtype=np.uint64)
    return worker.nixl_wrapper.prep_xfer_dlist("NIXL_INIT_AGENT", rows, worker.nixl_memory_type)


def release_ring(worker: NixlPushConnectorWorker, handle: Any) -> None:
    """Release a prepared list."""
    worker.nixl_wrapper.release_dlist_handle(handle)
