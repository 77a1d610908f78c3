"""Checksums of parts of an engine's KV cache. Two engines get equal ones for equal KV, whatever the layout of each.

A part is some tokens of some KV heads of one layer, in one kernel block. Its bytes have one order: head by head; in a
head field by field, as a backend may keep keys and values apart; in a field token by token. That says nothing of block
sizes, of strides or of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

CHECKSUM = "crc32/1"
"""The checksum, and the version of the order of bytes."""
COPY_BYTES = 4 << 20
"""The most KV that is copied from a device at a time."""


class Field(NamedTuple):
    """Neighbouring ``strips`` of a head in a kernel block. Each has ``token_bytes`` for every token there."""

    strips: int
    token_bytes: int


class Place(NamedTuple):
    """``tokens`` tokens of a kernel block, after ``skipped`` ones."""

    block: int
    skipped: int
    tokens: int


@dataclass(frozen=True, eq=False)
class LayerKv:
    """One layer's ``cache`` on this rank, ``[kernel blocks, heads, tokens, content]`` with any strides.

    Its KV cache ``group`` has ``kernel_blocks`` kernel blocks in a block. ``all_heads`` is the number of KV heads on
    all ranks, of which a rank has some; None: each rank has all. ``fields`` are those of a head; empty: tokens may
    share bytes, so a part has all tokens of a kernel block.
    """

    cache: torch.Tensor
    group: int
    kernel_blocks: int = 1
    all_heads: int | None = None
    fields: tuple[Field, ...] = ()

    @property
    def kernel_tokens(self) -> int:
        """The number of tokens in a kernel block."""
        return int(self.cache.shape[2])

    def heads_of(self, rank: int, ranks: int) -> range:
        """The KV heads that tensor parallel rank ``rank`` of ``ranks`` has of this layer."""
        if self.all_heads is None:
            return range(int(self.cache.shape[1]))
        parts = min(ranks, self.all_heads)
        size, part = self.all_heads // parts, rank // (ranks // parts)
        return range(part * size, (part + 1) * size)

    def size(self, heads: range, tokens: int) -> int:
        """The bytes of so many tokens of these heads."""
        return int(len(heads) * tokens * self.cache.shape[3] * self.cache.element_size())


class KvParts:
    """The KV cache of a rank by layer's name. ``rank`` of ``ranks`` is its tensor parallel rank. Writer thread only."""

    def __init__(self, layers: Mapping[str, LayerKv], rank: int, ranks: int) -> None:
        self.layers = layers
        self._rank, self._ranks = rank, ranks
        devices = {layer.cache.device for layer in layers.values() if layer.cache.device.type == "cuda"}
        self._streams = {device: torch.cuda.Stream(device, priority=-1) for device in devices}

    def heads(self, name: str) -> range:
        """The KV heads of a layer that this rank has."""
        return self.layers[name].heads_of(self._rank, self._ranks)

    def checksums(self, name: str, heads: range, places: Sequence[Place]) -> bytes:
        """A checksum of 4 bytes for each place. ``heads`` are this rank's, or some of them.

        From a device it first copies the blocks to the host, on a stream of its own. Raises ``RuntimeError``.
        """
        layer, first = self.layers[name], self.heads(name).start
        cache = layer.cache.view(torch.uint8)[:, heads.start - first : heads.stop - first]
        sums: list[int] = []
        if on_host(cache):
            blocks = cache.numpy()
            sums.extend(_checksum(layer, blocks[place.block], place) for place in places)
        else:
            count = max(1, COPY_BYTES // layer.size(heads, layer.kernel_tokens))
            for some in (places[at : at + count] for at in range(0, len(places), count)):
                with torch.cuda.stream(self._streams.get(cache.device)):
                    index = torch.tensor([place.block for place in some], dtype=torch.int64, device=cache.device)
                    blocks = cache.index_select(0, index).cpu().numpy()
                sums.extend(_checksum(layer, block, place) for block, place in zip(blocks, some, strict=True))
        return b"".join(value.to_bytes(4) for value in sums)


def on_host(cache: torch.Tensor) -> bool:
    """Whether the CPU can read the memory."""
    return str(cache.device.type) == "cpu"


def _checksum(layer: LayerKv, block: NDArray[np.uint8], place: Place) -> int:
    """Of ``block``, ``[heads, tokens, bytes]``."""
    heads, kernel, content = block.shape
    memory, start, value = np.ascontiguousarray(block).reshape(heads, -1), 0, 0
    for strips, size in layer.fields or (Field(1, content),):
        field = memory[:, start : start + strips * kernel * size].reshape(heads, strips, kernel, size)
        value = zlib.crc32(np.ascontiguousarray(field[:, :, place.skipped : place.skipped + place.tokens]).data, value)
        start += strips * kernel * size
    return value
