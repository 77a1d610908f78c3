"""A worker's staging memory, for WRITEs of gathered blocks.

``allocate`` and ``build`` run on the main thread at start-up, before the writer's loop, ``close`` there after it.
``with_gathering`` runs on the writer thread.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from layerpush.compat.cache_layout import layer_bytes, slot_views
from layerpush.compat.engine_settings import engine_fallback, only_decodes
from layerpush.compat.kinds import CacheKinds
from layerpush.compat.links import has_equal_blocks
from layerpush.compat.rings import own_ring, register_ring, release_ring
from layerpush.core.config import LayerPushConfig
from layerpush.core.layout import CacheLayout, LayoutError
from layerpush.transport.gather.cost import CopyCost
from layerpush.transport.gather.gatherer import Gatherer
from layerpush.transport.gather.ring import Ring
from layerpush.transport.gather.strategy import GatherStrategy
from layerpush.transport.gather.tensor_memory import TensorStaging, staging_memory
from layerpush.transport.link import Link

if TYPE_CHECKING:
    from layerpush.compat.push_worker import VllmPushWorker

logger = logging.getLogger(f"vllm.{__name__}")

LAYERS = 8
"""Layers of the largest step that such a ring has room for in a host's memory, within its limits."""
MIN_BYTES, MAX_BYTES = 64 << 20, 512 << 20
"""Limits of a ring whose size is not configured, in a host's memory."""
DEVICE_BYTES = 64 << 20
"""Bytes of such a ring on a GPU. vLLM plans a GPU's memory to the last 150 MiB, and does not know of the ring."""
ALLOCATED_BYTES = 2 << 20
"""torch takes large memory of a GPU in multiples of this."""


def default_bytes(layer: int, device: torch.device) -> int:
    """Bytes of a ring on ``device``; ``layer`` are the bytes of a layer of the engine's largest step."""
    return DEVICE_BYTES if device.type != "cpu" else min(max(LAYERS * layer, MIN_BYTES), MAX_BYTES)


class WorkerGathering:
    """``strategy`` stays None without staging memory, or if blocks of the KV cache cannot be gathered."""

    def __init__(self, worker: VllmPushWorker, config: LayerPushConfig) -> None:
        self.strategy: GatherStrategy | None = None
        self._worker = worker
        self._config = config
        self._memory: torch.Tensor | None = None
        self._staging: TensorStaging | None = None
        self._blocks: Any = None

    @property
    def rings(self) -> tuple[Ring, ...]:
        """This worker's staging ring, or none."""
        return () if self._staging is None else (self._staging.ring,)

    def allocate(self, device: torch.device) -> None:
        """Make staging memory and register it with NIXL, before the KV cache: a handshake describes both to a peer.

        A failure is logged; then this worker gathers nothing.
        """
        if self._config.packing == "off" or not self._config.layerwise or only_decodes(self._worker.vllm_config):
            return
        if self._worker.has_copies:
            return  # this rank pushes nothing
        reason = CacheKinds(self._worker.kv_cache_config).never_gathered()
        if reason is not None:
            logger.info("layerpush gathers nothing: %s", reason)
            return
        if engine_fallback(self._worker) is not None:
            return  # logged elsewhere: this engine pushes whole requests
        size = self._config.staging_bytes
        size = default_bytes(layer_bytes(self._worker), device) if size is None else size
        if not size:
            return
        try:
            self._memory = staging_memory(size, device)
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain one on a CPU
            logger.warning("layerpush gathers nothing: no memory for staging_bytes=%d: %s", size, error)
            return
        try:
            register_ring(self._worker, self._memory.data_ptr(), size, device.index or 0)
        except Exception as error:  # noqa: BLE001  NIXL's; the KV cache may be registered all the same
            logger.warning("layerpush gathers nothing: staging memory cannot be registered: %s", error)
            self._memory = None
            return
        if device.type != "cpu":
            taken = -(-self._memory.untyped_storage().nbytes() // ALLOCATED_BYTES) * ALLOCATED_BYTES
            logger.info(
                "layerpush: %d bytes of staging memory on %s are not in vLLM's plan of its memory: subtract them from "
                "a --kv-cache-memory that vLLM has advised",
                taken,
                device,
            )

    def build(self, layout: CacheLayout, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the strategy. After the KV cache was registered, if it can be used by layer."""
        if self._memory is None:
            return
        try:
            views = slot_views(layout, kv_caches)
            staging = TensorStaging(layout, views, self._memory)
        except (LayoutError, ValueError) as error:
            logger.info("layerpush gathers nothing: %s", error)
            return
        except RuntimeError as error:  # torch.OutOfMemoryError, or memory that cannot be pinned
            logger.warning("layerpush gathers nothing: no memory for the block ids of copies: %s", error)
            return
        try:
            copies = CopyCost(*staging.copy_costs())
        except Exception as error:  # noqa: BLE001  Triton's or a device's: without copies nothing is gathered
            logger.warning("layerpush gathers nothing: blocks cannot be copied on this device: %s", error)
            return
        worker, size = self._worker, staging.ring.capacity_bytes
        try:
            self._blocks = own_ring(worker, staging.base, size, staging.block_bytes)
        except Exception as error:  # noqa: BLE001  NIXL's; the KV cache is registered all the same
            logger.warning("layerpush gathers nothing: NIXL does not know the staging memory: %s", error)
            return
        self._staging = staging
        gatherer = Gatherer(worker.transport, layout, staging, staging.block_bytes)
        assert self._config.packing != "off"
        self.strategy = GatherStrategy(gatherer, self._config.packing, copies)

    def with_gathering(self, link: Link) -> Link:
        """``link``, with a route from our ring into the decode engine's cache if there is one."""
        if self.strategy is None or link.refusal is not None or len(link.routes) != 1:
            return link
        if link.pieces is not None or not has_equal_blocks(self._worker, link.engine_id):
            return link
        return replace(link, gathered=replace(link.routes[0], local_descriptors=self._blocks))

    def close(self) -> None:
        """Give the list of descriptors back, before NIXL shuts down."""
        blocks, self._blocks = self._blocks, None
        if blocks is None:
            return
        try:
            release_ring(self._worker, blocks)
        except Exception as error:  # noqa: BLE001  NIXL's; it gives the list back with its agent
            logger.warning("NIXL keeps a list of descriptors of a ring: %s", error)
