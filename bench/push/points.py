"""The measured points: block sizes, counts, and patterns of block ids. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.pair.tables import PATTERNS, Draw, draw_blocks

SIZES = tuple(kib << 10 for kib in (2, 4, 8, 16, 32, 64, 256))
COUNTS = (16, 64, 256, 1024, 4096)
QUICK_SIZES, QUICK_COUNTS = (2 << 10, 16 << 10, 64 << 10), (64, 1024)
POOL_FACTOR = 2
"""A cache has so many times the blocks of the largest WRITE."""
FIXED_BYTES = 24 << 20
"""The fixed work of a sample takes about as long as this many bytes."""


@dataclass(frozen=True)
class Point:
    """One WRITE: ``blocks`` blocks in each of ``layers`` layers, ``block_bytes`` bytes each, whose ids are ``ids``."""

    block_bytes: int
    blocks: int
    ids: str
    layers: int = 1

    @property
    def bytes(self) -> int:
        return self.block_bytes * self.blocks * self.layers

    @property
    def weight(self) -> int:
        """About proportional to the time of a sample."""
        return FIXED_BYTES + self.bytes

    def __str__(self) -> str:
        layers = f" x {self.layers} layers" if self.layers > 1 else ""
        return f"{self.block_bytes / 1024:g} KiB x {self.blocks}{layers}, {self.ids}"


def draw(point: Point, pool: int, seed: int, number: int) -> Draw:
    """The ``number``-th choice of blocks among ``pool`` on each side: the same in every process."""
    known = sorted(PATTERNS).index(point.ids)
    return draw_blocks(
        point.ids, point.blocks, pool, (seed, point.block_bytes, point.blocks, point.layers, known, number)
    )


def points(
    sizes: Sequence[int], counts: Sequence[int], patterns: Sequence[str], layers: int, most: int
) -> tuple[list[Point], list[Point]]:
    """Points of up to ``most`` bytes, and the other ones. One block size after the other."""
    every = [Point(size, count, ids, layers) for size, count, ids in itertools.product(sizes, counts, patterns)]
    return [point for point in every if point.bytes <= most], [point for point in every if point.bytes > most]
