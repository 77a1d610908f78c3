"""One process's side: a NIXL agent, a synthetic KV cache, and memory beside it."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np
import torch

from bench.calm import delay_progress_thread
from bench.forward.models import BLOCK_TOKENS
from bench.forward.orders import Introduction
from bench.forward.settings import POISON, ForwardSettings
from layerpush.core.layout import CacheLayout, LayerSlots, Region
from layerpush.transport.gather.tensor_memory import staging_memory
from layerpush.transport.kv_parts import Field, KvParts, LayerKv
from layerpush.transport.locked import LockedAgent
from layerpush.transport.nixl import NixlTransport

NOTIFICATION_POLL_S = 1e-3
"""Poll interval of a worker's writer thread that awaits a message, in seconds."""
GONE = (EOFError, ConnectionResetError, BrokenPipeError)
"""Errors of a connection whose other process has ended."""
MEMORY_TYPES = {"cpu": "DRAM", "cuda": "VRAM"}
LOOK_BYTES = 32 << 20


class ProcessSide:
    """``memory`` becomes the KV cache of each geometry in turn. On P ``ring`` is the staging memory. The WRITE that
    measures the wire goes from ring to ring. NIXL has registered both.
    """

    def __init__(self, name: str, settings: ForwardSettings) -> None:
        torch.set_num_threads(1)
        self.settings = settings
        self.device = torch.device(settings.device)
        self.memory = staging_memory(settings.cache_bytes, self.device).fill_(POISON)
        self.ring = staging_memory(settings.staging_bytes, self.device).fill_(POISON)
        self.agent = LockedAgent(_agent(name, settings))
        self.transport = NixlTransport(self.agent)
        self._memory_type = MEMORY_TYPES[self.device.type]
        rows = [(part.data_ptr(), part.numel(), self.device_id, "") for part in (self.memory, self.ring)]
        self.agent.register_memory(self.agent.get_reg_descs(rows, self._memory_type))

    @property
    def device_id(self) -> int:
        return self.device.index or 0

    def descriptors(
        self, agent: str, base: int, size: int, element: int, device_id: int, every: int | None = None
    ) -> Any:
        """A NIXL descriptor list of our memory (``"NIXL_INIT_AGENT"``) or another agent's. A descriptor has ``element``
        bytes. One begins every ``every`` bytes; None: without gaps.
        """
        every = every or element
        rows = np.asarray([[base, element, device_id, every, size // every]], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(agent, rows, self._memory_type)

    def introduction(self, digest: bytes) -> Introduction:
        """Metadata and addresses for the other side."""
        metadata = self.agent.get_agent_metadata()
        return Introduction(metadata, self.memory.data_ptr(), self.ring.data_ptr(), self.device_id, digest)

    def release(self, descriptors: Any) -> None:
        self.agent.release_dlist_handle(descriptors)

    def cache(self, block_bytes: int, layers: int) -> Cache:
        return Cache(self.memory, block_bytes, layers)


class Cache:
    """KV caches of ``layers`` layers in ``memory``, equal parts of it one after the other."""

    def __init__(self, memory: torch.Tensor, block_bytes: int, layers: int) -> None:
        self.blocks = memory.numel() // (block_bytes * layers)
        self.slots = shaped(memory, block_bytes, layers)
        regions = tuple(Region(slot.data_ptr(), block_bytes, self.blocks) for slot in self.slots)
        names = tuple(LayerSlots(f"layers.{index}", 0, (index,)) for index in range(layers))
        self.layout = CacheLayout(names, regions)

    @property
    def parts(self) -> KvParts:
        """The KV of one head for each token, to take checksums."""
        views = [slot.view(self.blocks, 1, BLOCK_TOKENS, -1) for slot in self.slots]
        layers = [LayerKv(view, 0, fields=(Field(1, view.shape[3]),)) for view in views]
        return KvParts({each.name: kv for each, kv in zip(self.layout.layers, layers, strict=True)}, 0, 1)


def shaped(memory: torch.Tensor, block_bytes: int, layers: int) -> list[torch.Tensor]:
    """Memory as layers, ``uint8 [blocks, block_bytes]`` each; a rest at the end belongs to no layer."""
    blocks = memory.numel() // (block_bytes * layers)
    return list(memory[: layers * blocks * block_bytes].view(layers, blocks, block_bytes).unbind())


def by_rank(memory: torch.Tensor, block_bytes: int, layers: int, ranks: int) -> list[list[torch.Tensor]]:
    """Memory as the caches of ``ranks`` ranks, one after the other, each with an equal part of every block."""
    used = memory.numel() // (block_bytes * layers) * block_bytes * layers
    return [shaped(part, block_bytes // ranks, layers) for part in memory[:used].chunk(ranks)]


def fill_with_noise(memory: torch.Tensor, seed: int) -> None:
    """Fill with the same bytes in every process, none of them poison."""
    generator = torch.Generator(memory.device).manual_seed(seed)
    memory.random_(0, POISON, generator=generator)


def strays(memory: torch.Tensor) -> int:
    """The number of bytes that are not poison. Compares piece by piece: a copy of all memory may not fit.

    Counts only in pieces with another byte, because counting takes ten times as long as comparing.
    """
    poison = torch.full_like(memory[:LOOK_BYTES], POISON)
    pieces = (piece for piece in memory.split(LOOK_BYTES) if not torch.equal(piece, poison[: piece.numel()]))
    return sum(int((piece != POISON).sum()) for piece in pieces)


def digest_of(memory: torch.Tensor) -> bytes:
    return hashlib.blake2b(memory.cpu().numpy(), digest_size=16).digest()


def settle(device: torch.device) -> None:
    """Wait for the work of the device. The other process may write there after the next message."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agent(name: str, settings: ForwardSettings) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    if settings.progress == "calm":
        delay_progress_thread(sys.modules[nixl_agent.__module__])
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=True, num_threads=0))  # layerpush's default
