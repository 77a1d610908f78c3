"""Checksums of parts of an engine's KV cache. Two engines get equal ones for equal KV, whatever the layout of each.

A part is some tokens of some KV heads of one layer, in one kernel block. Its bytes have one order: field by field, as a
backend may keep keys and values apart; in a field head by head; in a head token by token. That says nothing of block
sizes, of strides or of ranks.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from layerpush_kernels import checksum_parts

CHECKSUM = "adler32/1"
"""The checksum, and the version of the order of bytes. A GPU computes Adler-32 in parallel, which CRC-32 prevents."""
COPY_BYTES = 4 << 20
"""The most KV that is copied from a device at a time, where the device takes no checksums."""
MAX_PROGRAMS = 64
"""Limits a launch to a part of a GPU's multiprocessors: the model needs the others."""

logger = logging.getLogger(f"vllm.{__name__}")


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
    """The KV cache of a rank by layer's name. ``rank`` of ``ranks`` is its tensor parallel rank.

    The main thread makes it at start-up, and on a GPU takes a first checksum of each layer. Then writer thread only.
    """

    def __init__(self, layers: Mapping[str, LayerKv], rank: int, ranks: int) -> None:
        self.layers = layers
        self._rank, self._ranks = rank, ranks
        devices = {layer.cache.device for layer in layers.values() if layer.cache.device.type == "cuda"}
        self._streams = {device: torch.cuda.Stream(device, priority=-1) for device in devices}
        self._in_place = {name for name, layer in layers.items() if self._is_taken_in_place(name, layer)}
        """The layers whose checksums the device takes. Blocks of the others are copied to the host first."""

    def heads(self, name: str) -> range:
        """The KV heads of a layer that this rank has."""
        return self.layers[name].heads_of(self._rank, self._ranks)

    def checksums(self, name: str, heads: range, places: Sequence[Place]) -> bytes:
        """A checksum of 4 bytes for each place. ``heads`` are this rank's, or some of them.

        A device works on a stream of its own, and this call waits for it. Raises ``RuntimeError``.
        """
        layer, first = self.layers[name], self.heads(name).start
        cache = layer.cache.view(torch.uint8)[:, heads.start - first : heads.stop - first]
        if on_host(cache):
            blocks = cache.numpy()
            sums = [_checksum(layer, blocks[place.block], place) for place in places]
        elif not places:
            sums = []
        else:
            with torch.cuda.stream(self._streams.get(cache.device)):
                sums = _on_device(cache, places) if name in self._in_place else _by_copies(layer, cache, places)
        return b"".join(value.to_bytes(4) for value in sums)

    def _is_taken_in_place(self, name: str, layer: LayerKv) -> bool:
        """Whether the device takes the right checksum of the first block."""
        if on_host(layer.cache) or len(layer.fields) > 1 or any(field.strips > 1 for field in layer.fields):
            return False
        cache, places = layer.cache.view(torch.uint8), [Place(0, 0, layer.kernel_tokens)]
        try:
            with torch.cuda.stream(self._streams.get(cache.device)):
                if _on_device(cache, places) == _by_copies(layer, cache, places):
                    return True
            reason = "they are wrong"
        except Exception as error:  # noqa: BLE001  Triton's or a device's: the host takes them
            reason = str(error)
        logger.warning("layerpush: the host takes the checksums of %s, not %s: %s", name, cache.device, reason)
        return False


def on_host(cache: torch.Tensor) -> bool:
    """Whether the CPU can read the memory."""
    return str(cache.device.type) == "cpu"


def _on_device(cache: torch.Tensor, places: Sequence[Place]) -> list[int]:
    where = torch.tensor(places, dtype=torch.int32, device=cache.device)
    out = torch.empty(len(places), dtype=torch.int64, device=cache.device)
    checksum_parts(cache, where, out, max_programs=MAX_PROGRAMS)
    return list(map(int, out.tolist()))


def _by_copies(layer: LayerKv, cache: torch.Tensor, places: Sequence[Place]) -> list[int]:
    sums: list[int] = []
    count = max(1, COPY_BYTES // cache[0].numel())
    for some in (places[at : at + count] for at in range(0, len(places), count)):
        index = torch.tensor([place.block for place in some], dtype=torch.int64, device=cache.device)
        blocks = cache.index_select(0, index).cpu().numpy()
        sums.extend(_checksum(layer, block, place) for block, place in zip(blocks, some, strict=True))
    return sums


def _checksum(layer: LayerKv, block: NDArray[np.uint8], place: Place) -> int:
    """Of ``block``, ``[heads, tokens, bytes]``."""
    heads, kernel, content = block.shape
    memory, start, value = np.ascontiguousarray(block).reshape(heads, -1), 0, 1
    for strips, size in layer.fields or (Field(1, content),):
        field = memory[:, start : start + strips * kernel * size].reshape(heads, strips, kernel, size)
        part = field[:, :, place.skipped : place.skipped + place.tokens]
        value = zlib.adler32(np.ascontiguousarray(part).data, value)
        start += strips * kernel * size
    return value
