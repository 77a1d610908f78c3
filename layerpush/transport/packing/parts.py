"""Splits a WRITE that is too large to be packed as one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from layerpush.core.write import Segment, Write


def split(write: Write, layer_bytes: Sequence[int], limit: int) -> list[Write]:
    """WRITEs of at most ``limit`` bytes each, with the blocks of ``write``, in its order. They have its id.

    ``layer_bytes``: bytes of a block in each layer. A block of more than ``limit`` bytes is a WRITE of its own. No
    segment may have gaps.
    """
    parts: list[Write] = []
    taken: list[Segment] = []
    size = 0
    for cut, cut_bytes in (pair for segment in write.segments for pair in _cuts(segment, layer_bytes, limit)):
        if taken and size + cut_bytes > limit:
            parts.append(replace(write, segments=tuple(taken), size=size))
            taken, size = [], 0
        taken.append(cut)
        size += cut_bytes
    return [*parts, replace(write, segments=tuple(taken), size=size)]


def _cuts(segment: Segment, layer_bytes: Sequence[int], limit: int) -> Iterator[tuple[Segment, int]]:
    """Some layers of all blocks, or if that is too large, some blocks of one layer; and their bytes."""
    layers, blocks = segment.layers, segment.end - segment.first
    if not blocks:
        return
    largest = max(layer_bytes[layers])
    layers_each = max(1, limit // (blocks * largest))
    blocks_each = min(blocks, max(1, limit // largest))
    for layer in range(layers.start, layers.stop, layers_each):
        these = slice(layer, min(layer + layers_each, layers.stop))
        for at in range(0, blocks, blocks_each):
            end = min(at + blocks_each, blocks)
            cut = replace(
                segment,
                layers=these,
                first=segment.first + at,
                end=segment.first + end,
                source=segment.source[at:end],
                target=segment.target[at:end],
            )
            yield cut, (end - at) * sum(layer_bytes[these])
