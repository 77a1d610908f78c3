"""P's routes to D's cache, for one geometry. Prepared with NIXL once, as in a worker."""

from __future__ import annotations

from typing import Any

from bench.forward.end import Cache, ProcessSide
from bench.forward.orders import Introduction
from layerpush.transport.base import Route
from layerpush.transport.gather.cost import CopyCost
from layerpush.transport.gather.gatherer import Gatherer
from layerpush.transport.gather.strategy import GatherStrategy
from layerpush.transport.gather.tensor_memory import TensorStaging
from layerpush.transport.link import Link

DECODE = "D"
"""D's name, as an agent and as an engine."""
OWN = "NIXL_INIT_AGENT"


class Reach:
    """``link`` goes to D's cache. All modes of one reach share its ``strategy``; None if nothing is packed.

    If D has several ``ranks``, ``link`` has a route to the cache of each of them, and no WRITE goes by way of staging
    memory, as in a worker. All ranks of D are one NIXL agent here.
    """

    def __init__(self, end: ProcessSide, decode: Introduction, block_bytes: int, layers: int, ranks: int) -> None:
        self._end = end
        self.cache: Cache = end.cache(block_bytes, layers)
        layout, packing = self.cache.layout, end.settings.packing
        size, device = len(self.cache.slots) * self.cache.blocks * block_bytes, end.device_id
        part, share = block_bytes // ranks, size // ranks
        memory = end.memory.data_ptr()
        ours = [end.descriptors(OWN, memory + rank * part, size, part, device, block_bytes) for rank in range(ranks)]
        theirs = [
            end.descriptors(DECODE, decode.memory + rank * share, share, part, decode.device_id)
            for rank in range(ranks)
        ]
        blocks = end.descriptors(OWN, end.ring.data_ptr(), end.ring.numel(), block_bytes, device)
        self._prepared: list[Any] = [*ours, *theirs, blocks]
        routes = tuple(Route(DECODE, rank, *pair) for rank, pair in enumerate(zip(ours, theirs, strict=True)))
        gathered = Route(DECODE, 0, blocks, theirs[0]) if ranks == 1 else None
        self.link = Link(DECODE, routes, layout.region_blocks, share=1 / ranks, gathered=gathered)
        self._staging = TensorStaging(layout, self.cache.slots, end.ring)
        gatherer = Gatherer(end.transport, layout, self._staging, block_bytes)
        copies = CopyCost(*self._staging.copy_costs())
        self.strategy = None if packing == "off" else GatherStrategy(gatherer, packing, copies)

    @property
    def ring_is_free(self) -> bool:
        """Whether every span of P's ring was given back."""
        return not self._staging.ring.used_bytes

    def close(self) -> None:
        for descriptors in self._prepared:
            self._end.release(descriptors)
