"""Maps the blocks of a layer to NIXL descriptor ids. Pure: numbers only, no tensors.

Descriptor ids are region-major on both sides: ``id = sum(region_blocks[:slot]) + block``, where a block is a
kernel block. The same slot names the same layer on both sides, so one ``CacheLayout`` and the peer's region
sizes are enough to address a WRITE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int32]

MAX_DESCRIPTORS = 2**31


class LayoutError(ValueError):
    """The registered regions cannot be assigned to layers. The text has the reason."""


@dataclass(frozen=True)
class Region:
    """``blocks`` kernel blocks of ``block_bytes`` from address ``base``, with ``gap`` bytes between two of them."""

    base: int
    block_bytes: int
    blocks: int
    gap: int = 0

    @property
    def stride(self) -> int:
        """Bytes from one kernel block to the next."""
        return self.block_bytes + self.gap


@dataclass(frozen=True)
class LayerCache:
    """One attention layer's KV cache as the engine holds it.

    ``start`` is the address of its tensor and ``span`` its extent in bytes, ``page_bytes`` the size of one kernel
    block, ``group`` the index of its transferable KV cache group. A kernel block begins ``stride`` bytes after the one
    before it; ``runs`` are the offsets of its contiguous parts, which are equally long.
    """

    name: str
    group: int
    start: int
    span: int
    page_bytes: int
    stride: int = 0
    runs: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class LayerSlots:
    """The slots (indices of regions in descriptor order) that hold one layer.

    One block of the scheduler's tables has ``kernel_blocks`` kernel blocks of it. ``calls_hook``: whether a hook
    reports the layer as it is computed.
    """

    name: str
    group: int
    slots: tuple[int, ...]
    kernel_blocks: int = 1
    calls_hook: bool = True


class RowPart(NamedTuple):
    """A region that is a part of each block of a registered one: the index of that, the offset in it, and its bytes."""

    row: int
    offset: int
    row_bytes: int


class States(NamedTuple):
    """The layers with a state. Their slots are those of ``regions``, which follow attention's in descriptor order.

    vLLM lays states and attention blocks of several layers over the same memory.
    """

    layers: tuple[LayerSlots, ...] = ()
    regions: tuple[Region, ...] = ()


NO_STATES = States()


@dataclass(frozen=True)
class CacheLayout:
    """Every layer's slots, and this engine's region sizes. Layers are in model order, but those with a state, which are
    ready last, follow all others.

    ``parts``: the engine has registered rows of several layers, and each of ``regions`` is this part of one of them.
    Empty: ``regions`` are the registered ones.
    """

    layers: tuple[LayerSlots, ...]
    regions: tuple[Region, ...]
    parts: tuple[RowPart, ...] = ()

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Each layer's index in ``layers``, by name."""
        return {layer.name: index for index, layer in enumerate(self.layers)}

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of one scheduler block in each layer."""
        return tuple(
            layer.kernel_blocks * sum(self.regions[slot].block_bytes for slot in layer.slots) for layer in self.layers
        )

    @cached_property
    def has_gaps(self) -> bool:
        """Whether neighbouring blocks are apart in memory, so that NIXL merges no descriptors."""
        return any(region.gap for region in self.regions)

    @cached_property
    def region_blocks(self) -> tuple[int, ...]:
        """Kernel blocks of each region, in descriptor order."""
        return tuple(region.blocks for region in self.regions)


@lru_cache(maxsize=64)
def kernel_ids(blocks: tuple[int, ...], kernel_blocks: int) -> BlockIds:
    """Kernel block ids of scheduler blocks, int32 of shape ``(n,)``; do not change it. If a scheduler block has two
    kernel blocks, ``[2]`` becomes ``[4, 5]``.
    """
    ids = np.asarray(blocks, dtype=np.int32)
    if kernel_blocks == 1:
        return ids
    return (ids[:, None] * kernel_blocks + np.arange(kernel_blocks, dtype=np.int32)).ravel()


def match_layers(
    caches: Sequence[LayerCache],
    regions: Sequence[Region],
    kernel_blocks: int = 1,
    states: States = NO_STATES,
) -> CacheLayout:
    """Find the slots of each layer of attention by address and check them.

    Raises ``LayoutError`` if a layer lies in no region, if a region belongs to no layer, or if the blocks of a layer's
    regions do not add up to its page and are no rows that hold it.
    """
    by_base = {region.base: index for index, region in enumerate(regions)}
    found = [_parts_of(cache, regions, by_base) for cache in caches]
    used = {part for parts in found for part in parts}
    unused = set(range(len(regions))).difference(part.row for part in used)
    parts = sorted(used.union(_Part(row, regions[row]) for row in unused), key=_Part.place)
    is_cut = any(part.region != regions[part.row] for part in parts)
    if is_cut and states.layers:
        raise LayoutError("layers with a state lie in rows of several layers")
    slots = {part: slot for slot, part in enumerate(parts)}
    layers = [
        LayerSlots(cache.name, cache.group, tuple(map(slots.__getitem__, own)), kernel_blocks)
        for cache, own in zip(caches, found, strict=True)
    ]
    row_parts = [
        RowPart(part.row, part.region.base - regions[part.row].base, regions[part.row].block_bytes) for part in parts
    ]
    return _checked(
        CacheLayout(
            (*layers, *states.layers),
            (*(part.region for part in parts), *states.regions),
            tuple(row_parts) if is_cut else (),
        ),
        states,
    )


def named_layers(
    names: Sequence[str], groups: Sequence[int], regions: Sequence[Region], kernel_blocks: int = 1
) -> CacheLayout:
    """The layout of an engine that registered one region per named layer, in this order. Raises ``LayoutError``."""
    if not len(names) == len(groups) == len(regions):
        raise LayoutError(f"{len(names)} layer names, {len(groups)} groups and {len(regions)} regions disagree")
    pairs = enumerate(zip(names, groups, strict=True))
    layers = tuple(LayerSlots(name, group, (slot,), kernel_blocks) for slot, (name, group) in pairs)
    return _checked(CacheLayout(layers, tuple(regions)))


class _Part(NamedTuple):
    """A registered region by index, or a part of each of its blocks."""

    row: int
    region: Region

    def place(self) -> tuple[int, int, int]:
        """Parts are ordered by row, then by place and size."""
        return self.row, self.region.base, self.region.block_bytes


def _parts_of(cache: LayerCache, regions: Sequence[Region], by_base: dict[int, int]) -> list[_Part]:
    exact, inside = by_base.get(cache.start), range(cache.start, cache.start + cache.span)
    whole = [exact] if exact is not None and regions[exact].block_bytes >= cache.page_bytes else None
    found = whole or [index for index, region in enumerate(regions) if region.base in inside]
    held = sum(regions[index].block_bytes for index in found)
    if held == cache.page_bytes:
        return [_Part(index, regions[index]) for index in found]
    size, rest = divmod(cache.page_bytes, len(cache.runs))
    last = cache.start + cache.runs[-1] + size
    for index, row in enumerate(regions):
        if row.base <= cache.start and last <= row.base + row.block_bytes and cache.stride == row.stride and not rest:
            return [_Part(index, Region(cache.start + run, size, row.blocks, row.stride - size)) for run in cache.runs]
    if not found:
        raise LayoutError(f"layer {cache.name} at {cache.start:#x} lies in no registered region")
    raise LayoutError(
        f"layer {cache.name} has pages of {cache.page_bytes} bytes but its regions {found} hold {held} bytes a block"
    )


def _checked(layout: CacheLayout, states: States = NO_STATES) -> CacheLayout:
    if not layout.layers:
        raise LayoutError("no layer has a transferable KV cache")
    covered = {slot for layer in layout.layers for slot in layer.slots}
    shared = {layout.regions[slot].base for layer in states.layers for slot in layer.slots}
    missing = [slot for slot, region in enumerate(layout.regions) if slot not in covered and region.base not in shared]
    if missing:
        raise LayoutError(f"regions {missing} belong to no known layer")
    return layout


def descriptor_offsets(region_blocks: Sequence[int]) -> NDArray[np.int32]:
    """First descriptor id of every slot, int32 of shape ``(slots,)``, for these region sizes in kernel blocks.

    Raises ``LayoutError`` if there are more descriptors than an int32 can count.
    """
    if sum(region_blocks) > MAX_DESCRIPTORS:
        raise LayoutError(f"{sum(region_blocks)} descriptors are more than the {MAX_DESCRIPTORS} that an id can name")
    return np.concatenate(([0], np.cumsum(region_blocks[:-1]))).astype(np.int32)


def descriptor_ids(offsets: NDArray[np.int32], slots: Sequence[int], blocks: BlockIds) -> NDArray[np.int32]:
    """Descriptor ids of kernel ``blocks`` in each of ``slots``, slot-major.

    Int32 of shape ``(len(slots) * len(blocks),)``. ``offsets`` come from ``descriptor_offsets``.
    """
    return (offsets[np.asarray(slots, dtype=np.intp)][:, None] + blocks[None, :]).ravel()
