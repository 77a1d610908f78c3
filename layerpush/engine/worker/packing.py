"""A worker's staging memory, for the packer of pushes and the unpacker of loads.

``allocate`` and ``build`` run on the main thread at start-up, before the writer's loop. Every other method runs on the
writer thread, unless its docstring names another.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from layerpush.compat.cache_layout import layer_bytes, slot_views
from layerpush.compat.engine_settings import engine_fallback
from layerpush.compat.kinds import has_states
from layerpush.compat.links import has_equal_blocks
from layerpush.compat.rings import own_ring, peer_ring, register_ring, release_ring
from layerpush.core.config import LayerPushConfig
from layerpush.core.layout import CacheLayout, LayoutError
from layerpush.core.wire import Unpacked, Window
from layerpush.transport.base import Route
from layerpush.transport.link import Link
from layerpush.transport.packing.calibration import SCRATCH_PIECES
from layerpush.transport.packing.cost_model import Costs
from layerpush.transport.packing.memory import PIECE_BYTES, whole_pieces
from layerpush.transport.packing.packer import Packer
from layerpush.transport.packing.ring import Ring
from layerpush.transport.packing.strategy import PackingStrategy
from layerpush.transport.packing.tensor_memory import TensorStaging, staging_memory
from layerpush.transport.packing.unpacker import Unpacker
from layerpush.transport.packing.windows import Windows

if TYPE_CHECKING:
    from layerpush.compat.push_worker import VllmPushWorker

logger = logging.getLogger(f"vllm.{__name__}")

WINDOWS = 8
"""Requests that a decode rank unpacks for at a time."""
MIN_BYTES, MAX_BYTES = 64 << 20, 512 << 20
"""Limits of a ring whose size is not configured, in a host's memory."""
DEVICE_BYTES = 64 << 20
"""Bytes of such a ring on a GPU. vLLM plans a GPU's memory to the last 150 MiB, and does not know of the ring."""
ALLOCATED_BYTES = 2 << 20
"""torch takes large memory of a GPU in multiples of this."""


def default_bytes(layer: int, device: torch.device) -> int:
    """Bytes of a ring on ``device``. In a host's memory its windows have room for ``layer`` bytes each, within the
    limits.
    """
    if device.type != "cpu":
        return DEVICE_BYTES
    return min(max(SCRATCH_PIECES * PIECE_BYTES + WINDOWS * whole_pieces(layer), MIN_BYTES), MAX_BYTES)


class WorkerPacking:
    """``strategy`` and ``unpacker`` stay None without staging memory, or if the KV cache cannot be packed."""

    def __init__(self, worker: VllmPushWorker, config: LayerPushConfig) -> None:
        self.strategy: PackingStrategy | None = None
        self.unpacker: Unpacker | None = None
        self._worker = worker
        self._config = config
        self._memory: torch.Tensor | None = None
        self._staging: TensorStaging | None = None
        self._blocks: Any = None
        self._pieces: Any = None
        self._rings: dict[str, tuple[Window, Any]] = {}

    @property
    def engines_to_measure(self) -> set[str]:
        """Decode engines whose calibration runs, or waits until there is no push. Any thread."""
        return set() if self.strategy is None else self.strategy.engines_to_measure

    @property
    def rings(self) -> tuple[Ring, ...]:
        """This worker's staging ring, or none."""
        return () if self._staging is None else (self._staging.ring,)

    def allocate(self, device: torch.device) -> None:
        """Make staging memory and register it with NIXL, before the KV cache: a handshake describes both to a peer.

        A failure is logged; then this worker packs nothing.
        """
        if self._config.packing == "off" or not self._config.layerwise:
            return
        if has_states(self._worker.kv_cache_config):
            logger.info("layerpush packs nothing: the model has layers with a state")
            return
        if engine_fallback(self._worker) is not None:
            return  # logged elsewhere: this engine pushes whole requests
        size = self._config.staging_bytes
        size = default_bytes(layer_bytes(self._worker), device) if size is None else size // PIECE_BYTES * PIECE_BYTES
        if not size:
            return
        try:
            self._memory = staging_memory(size, device)
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain one on a CPU
            logger.warning("layerpush packs nothing: no memory for staging_bytes=%d: %s", size, error)
            return
        try:
            register_ring(self._worker, self._memory.data_ptr(), size, device.index or 0)
        except Exception as error:  # noqa: BLE001  NIXL's; the KV cache may be registered all the same
            logger.warning("layerpush packs nothing: staging memory cannot be registered: %s", error)
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
        """Make the packer and the unpacker. After the KV cache was registered, if it can be used by layer."""
        if self._memory is None:
            return
        try:
            views = slot_views(self._worker, kv_caches)
            staging = TensorStaging(layout, views, self._memory)
        except (LayoutError, ValueError) as error:
            logger.info("layerpush packs nothing: %s", error)
            return
        except RuntimeError as error:  # torch.OutOfMemoryError, or memory that cannot be pinned
            logger.warning("layerpush packs nothing: no memory for the block ids of copies: %s", error)
            return
        try:
            copy_s, byte_s = staging.copy_costs()
        except Exception as error:  # noqa: BLE001  Triton's or a device's: without copies there is no packing
            logger.warning("layerpush packs nothing: blocks cannot be copied on this device: %s", error)
            return
        costs = Costs(gather_s=byte_s, scatter_s=byte_s, copy_s=copy_s)
        if staging.ring.take(SCRATCH_PIECES * PIECE_BYTES) is None:
            logger.warning("layerpush packs nothing: staging_bytes=%d is too small", staging.ring.capacity_bytes)
            return
        worker, size = self._worker, staging.ring.capacity_bytes
        try:
            self._blocks = own_ring(worker, staging.base, size, staging.block_bytes)
            self._pieces = own_ring(worker, staging.base, size, PIECE_BYTES)
        except Exception as error:  # noqa: BLE001  NIXL's; the KV cache is registered all the same
            logger.warning("layerpush packs nothing: NIXL does not know the staging memory: %s", error)
            return
        self._staging = staging
        packer = Packer(worker.transport, layout, staging, staging.block_bytes)
        assert self._config.packing != "off"
        self.strategy = PackingStrategy(packer, layout, self._config.packing, costs)
        windows = Windows(staging.ring, (size - SCRATCH_PIECES * PIECE_BYTES) // WINDOWS // PIECE_BYTES * PIECE_BYTES)
        self.unpacker = Unpacker(staging, windows, layout, worker.tp_rank, staging.base, worker.device_id)

    def with_gathering(self, link: Link) -> Link:
        """``link``, with a route from our ring into the decode engine's cache if there is one."""
        if self.strategy is None or link.refusal is not None or len(link.routes) != 1:
            return link
        if not has_equal_blocks(self._worker, link.engine_id):
            return link
        return replace(link, gathered=replace(link.routes[0], local_descriptors=self._blocks))

    def ring_of(self, engine_id: str, agent: str, window: Window) -> Route | None:
        """The route from our ring into a decode rank's; None if that ring cannot be written to."""
        if self.strategy is None:
            return None
        known = self._rings.get(engine_id)
        if known is None:
            try:
                handle = peer_ring(self._worker, agent, window)
            except Exception as error:  # noqa: BLE001  NIXL's; the rank announced memory that it does not have
                logger.warning("layerpush packs nothing for decode engine %s: %s", engine_id, error)
                handle = None
            known = self._rings[engine_id] = (window, handle)
            if handle is not None:
                ring = Route(agent, window.rank, self._pieces, handle)
                self.strategy.calibrate(engine_id, self._worker.transport, ring)
        offer, handle = known
        if handle is None or (offer.ring, offer.ring_size, offer.device) != (
            window.ring,
            window.ring_size,
            window.device,
        ):
            return None  # a process has one ring for life: WRITEs may be on their way to the first
        return Route(agent, window.rank, self._pieces, handle)

    def unpacked(self, agent: str, message: Unpacked) -> None:
        """A decode rank has unpacked a WRITE, or will not."""
        if self.strategy is not None:
            self.strategy.unpacked(agent, message.number, message.done)

    def disconnected(self, engine_id: str) -> None:
        """Forget a decode engine and its ring."""
        if self.strategy is not None:
            self.strategy.forget(engine_id)  # its WRITEs, before the ring that they go to
        _, handle = self._rings.pop(engine_id, (None, None))
        if handle is not None:
            self._release(handle)

    def close(self) -> None:
        """Give descriptor lists back, before NIXL shuts down. Main thread, after the writer."""
        for engine_id in list(self._rings):
            self.disconnected(engine_id)
        for handle in (self._blocks, self._pieces):
            if handle is not None:
                self._release(handle)
        self._blocks = self._pieces = None

    def _release(self, handle: Any) -> None:
        try:
            release_ring(self._worker, handle)
        except Exception as error:  # noqa: BLE001  NIXL's; it gives the list back with its agent
            logger.warning("NIXL keeps a list of descriptors of a ring: %s", error)
