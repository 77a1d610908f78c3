"""From a WRITE of prompt blocks to descriptor ids on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerpush.core.layout import BlockIds, CacheLayout, descriptor_ids, descriptor_offsets, kernel_ids
from layerpush.core.pieces import Pieces
from layerpush.core.replica import Replica
from layerpush.core.write import Write
from layerpush.transport.base import DescriptorIds, Route
from layerpush.transport.link_speed import LinkSpeed


@dataclass(frozen=True)
class Link:
    """A decode engine that this rank can write into.

    ``region_blocks`` are its regions' sizes in kernel blocks. ``share`` is the part of each of our blocks that one
    route carries: 1, or one over the number of decode ranks that split our heads. ``refusal`` is the reason why its
    blocks cannot be written layer by layer, None if they can. ``replicas`` is this rank's part of the blocks in each KV
    cache group; empty: all. ``pieces``: its blocks have another size than ours; a WRITE's segments and the descriptors
    of the routes are pieces. ``gathered`` is the route from our staging ring into its cache, if there is one.
    ``speed`` is measured over all connections to the engine.
    """

    engine_id: str
    routes: tuple[Route, ...]
    region_blocks: tuple[int, ...]
    share: float = 1.0
    refusal: str | None = None
    replicas: tuple[Replica, ...] = ()
    pieces: Pieces | None = None
    gathered: Route | None = None
    speed: LinkSpeed = field(default_factory=LinkSpeed, compare=False)


class _Blocks(NamedTuple):
    """Kernel blocks, the lowest (or 0) and the highest of them (or -1)."""

    ids: BlockIds
    lowest: int
    highest: int


class DirectPlanner:
    """Plans WRITEs straight from cache to cache, ids ascending so that neighbouring blocks merge into one transfer."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._local_offsets = descriptor_offsets(layout.region_blocks)
        self._remote_offsets: dict[tuple[int, ...], NDArray[np.int32]] = {}

    def descriptors(self, write: Write, link: Link) -> tuple[DescriptorIds, DescriptorIds]:
        """Descriptor ids of ``write`` here and on the decode engine, pairwise.

        Raises ``LookupError`` for a block outside its region, whose id would name another layer's block.
        """
        if link.pieces is not None:
            return self._of_pieces(write, link, link.pieces)
        remote_offsets = self._remote_offsets.get(link.region_blocks)
        if remote_offsets is None:
            remote_offsets = self._remote_offsets[link.region_blocks] = descriptor_offsets(link.region_blocks)
        local, remote = [], []
        for part in write.segments:
            layers = self._layout.layers[part.layers]
            slots, kernel_blocks = [slot for layer in layers for slot in layer.slots], layers[0].kernel_blocks
            source, target = _expanded(part.source, kernel_blocks), _expanded(part.target, kernel_blocks)
            _check("this engine", source, slots, self._layout.region_blocks)
            _check(f"decode engine {link.engine_id}", target, slots, link.region_blocks)
            local.append(descriptor_ids(self._local_offsets, slots, source.ids))
            remote.append(descriptor_ids(remote_offsets, slots, target.ids))
        return np.concatenate(local), np.concatenate(remote)

    def _of_pieces(self, write: Write, link: Link, pieces: Pieces) -> tuple[DescriptorIds, DescriptorIds]:
        local, remote = [], []
        for part in write.segments:
            slots = [slot for layer in self._layout.layers[part.layers] for slot in layer.slots]
            here = PieceRows(pieces.rows, pieces.our_kernel, self._layout.region_blocks)
            there = PieceRows(pieces.rows, pieces.their_kernel, link.region_blocks)
            local.append(here.ids("this engine", slots, part.source))
            remote.append(there.ids(f"decode engine {link.engine_id}", slots, part.target))
        return np.concatenate(local), np.concatenate(remote)


class PieceRows(NamedTuple):
    """Descriptors of the pieces of one engine's blocks, as ``compat/pieces.py`` prepares them: slot by slot, in each
    head by head if there is more than one of its ``rows``, then part by part of the ``parts`` of a kernel block; a
    row of them has one for each of the slot's ``region_blocks``.
    """

    rows: tuple[int, ...]
    parts: int
    region_blocks: tuple[int, ...]

    def ids(self, where: str, slots: Sequence[int], pieces: Sequence[int]) -> DescriptorIds:
        """Ids of ``pieces`` in each of ``slots``, slot-major. Raises ``LookupError`` for one outside its region."""
        blocks, part = np.divmod(np.asarray(pieces, dtype=np.int32), self.parts)
        _check(where, _Blocks(blocks, blocks.min(initial=0), blocks.max(initial=-1)), slots, self.region_blocks)
        sizes = [rows * self.parts * count for rows, count in zip(self.rows, self.region_blocks, strict=True)]
        offsets = descriptor_offsets(sizes)
        ids: list[DescriptorIds] = []
        for slot in slots:
            row = np.arange(self.rows[slot], dtype=np.int32)[:, None] * self.parts + part
            ids.append((offsets[slot] + row * self.region_blocks[slot] + blocks).ravel())
        return np.concatenate(ids)


@lru_cache(maxsize=64)
def _expanded(blocks: tuple[int, ...], kernel_blocks: int) -> _Blocks:
    ids = kernel_ids(blocks, kernel_blocks)
    return _Blocks(ids, int(ids.min(initial=0)), int(ids.max(initial=-1)))


def _check(where: str, blocks: _Blocks, slots: Sequence[int], region_blocks: Sequence[int]) -> None:
    limit = min(map(region_blocks.__getitem__, slots))
    if blocks.highest >= limit or blocks.lowest < 0:
        raise LookupError(f"block {blocks.highest} lies outside a region of {limit} blocks on {where}")
