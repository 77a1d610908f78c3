"""Block ids of a prompt on both sides. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PATTERNS = {
    "contiguous": "one run on both sides",
    "random": "any order on both sides",
}


@dataclass(frozen=True)
class Draw:
    """Block ids, pairwise. No prompt has block 0."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def parts(self, count: int) -> list[Draw]:
        """Equal parts of the draw, in order. ``count`` must divide the number of blocks."""
        size = len(self.sources) // count
        starts = range(0, size * count, size)
        return [Draw(self.sources[start : start + size], self.targets[start : start + size]) for start in starts]


def draw_blocks(ids: str, blocks: int, pool: int, key: Sequence[int]) -> Draw:
    """``blocks`` blocks among ``pool`` on each side, by a pattern. Equal keys give equal blocks in every process."""
    generator = np.random.default_rng(list(key))
    sides = [(_scattered if ids == "random" else _run)(generator, pool, blocks) for _ in range(2)]
    return Draw(*(tuple(side.tolist()) for side in sides))


def _run(generator: np.random.Generator, pool: int, count: int) -> np.ndarray:
    return int(generator.integers(1, pool - count + 1)) + np.arange(count)


def _scattered(generator: np.random.Generator, pool: int, count: int) -> np.ndarray:
    return 1 + generator.choice(pool - 1, count, replace=False)
