"""P's routes to D's cache and ring, for one geometry. Prepared with NIXL once, as in a worker."""

from __future__ import annotations

import time
from typing import Any

from bench.pair.end import Cache, End
from bench.pair.orders import Introduction
from layerpush.core.wire import Registration
from layerpush.transport.base import Route
from layerpush.transport.link import Link
from layerpush.transport.packing.cost_model import Costs
from layerpush.transport.packing.memory import PIECE_BYTES
from layerpush.transport.packing.packer import Packer, PushWindow
from layerpush.transport.packing.strategy import Packing, PackingStrategy

DECODE = "D"
"""D's name, as an agent and as an engine."""
OWN = "NIXL_INIT_AGENT"


class Reach:
    """``link`` goes to D's cache, ``ring`` to D's ring in pieces. All strategies of one reach share its packer.

    If D has several ``ranks``, ``link`` has a route to the cache of each of them, and no WRITE goes by way of staging
    memory, as in a worker. All ranks of D are one NIXL agent here.
    """

    def __init__(self, end: End, decode: Introduction, block_bytes: int, layers: int, ranks: int = 1) -> None:
        self._end = end
        self.cache: Cache = end.cache(block_bytes, layers)
        size, device = len(self.cache.slots) * self.cache.blocks * block_bytes, end.device_id
        part, share = block_bytes // ranks, size // ranks
        ring, base = end.ring.numel(), end.ring.data_ptr()
        memory = end.memory.data_ptr()
        ours = [end.descriptors(OWN, memory + rank * part, size, part, device, block_bytes) for rank in range(ranks)]
        theirs = [
            end.descriptors(DECODE, decode.memory + rank * share, share, part, decode.device_id)
            for rank in range(ranks)
        ]
        blocks = end.descriptors(OWN, base, ring, block_bytes, device)
        pieces = end.descriptors(OWN, base, ring, PIECE_BYTES, device)
        their_pieces = end.descriptors(DECODE, decode.ring, ring, PIECE_BYTES, decode.device_id)
        self._prepared: list[Any] = [*ours, *theirs, blocks, pieces, their_pieces]
        layout = self.cache.layout
        routes = tuple(Route(DECODE, rank, *pair) for rank, pair in enumerate(zip(ours, theirs, strict=True)))
        gathered = Route(DECODE, 0, blocks, theirs[0]) if ranks == 1 else None
        self.link = Link(DECODE, routes, layout.region_blocks, share=1 / ranks, gathered=gathered)
        self.ring = Route(DECODE, 0, pieces, their_pieces)
        self.packer = Packer(end.transport, layout, self.cache.staging, block_bytes)
        copy_s, byte_s = self.cache.staging.copy_costs()
        self._prior = Costs(gather_s=byte_s, scatter_s=byte_s, copy_s=copy_s)

    def strategy(self, packing: Packing) -> PackingStrategy:
        return PackingStrategy(self.packer, self.cache.layout, packing, self._prior)

    def calibrate(self, strategy: PackingStrategy, pause: float) -> None:
        """Calibrate as a worker does when a decode engine first offers its ring."""
        strategy.calibrate(DECODE, self._end.transport, self.ring)
        while strategy.is_busy:
            strategy.turn()
            time.sleep(pause)

    def window(self, registration: Registration) -> PushWindow | None:
        """The part of D's ring for this request; None if D offers none or has several ranks."""
        offer = registration.window
        return (
            None
            if offer is None or len(self.link.routes) > 1
            else PushWindow(offer, self.ring, registration.request_id)
        )

    def close(self) -> None:
        for descriptors in self._prepared:
            self._end.release(descriptors)
