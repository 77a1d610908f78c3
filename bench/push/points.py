"""What is measured: block sizes, counts, and where the blocks lie. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

SIZES = tuple(kib << 10 for kib in (2, 4, 8, 16, 32, 64, 256))
COUNTS = (16, 64, 256, 1024, 4096)
QUICK_SIZES, QUICK_COUNTS = (2 << 10, 16 << 10, 64 << 10), (64, 1024)
PATTERNS = {
    "contiguous": "one run on both sides",
    "half": "a run for one half, any order for the other, on both sides",
    "random-p": "any order on P, one run on D",
    "random": "any order on both sides",
}
POOL_FACTOR = 2
"""A cache has so many times the blocks of the largest WRITE."""
FIXED_BYTES = 24 << 20
"""What comes with every sample takes as long as moving about so many bytes."""


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


@dataclass(frozen=True)
class Draw:
    """Block ids of one WRITE, pairwise. Block 0 belongs to nobody."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


def draw(point: Point, pool: int, seed: int, number: int) -> Draw:
    """The ``number``-th choice of blocks among ``pool`` on each side: the same in every process."""
    known = sorted(PATTERNS).index(point.ids)
    generator = np.random.default_rng([seed, point.block_bytes, point.blocks, point.layers, known, number])
    if point.ids == "half":
        whole = point.blocks // 2
        sides = [_half(generator, pool, point.blocks, whole) for _ in range(2)]
    else:
        scattered = {"contiguous": (False, False), "random-p": (True, False), "random": (True, True)}[point.ids]
        sides = [
            _scattered(generator, pool, point.blocks) if apart else _run(generator, pool, point.blocks)
            for apart in scattered
        ]
    return Draw(*(tuple(side.tolist()) for side in sides))


def points(
    sizes: Sequence[int], counts: Sequence[int], patterns: Sequence[str], layers: int, most: int
) -> tuple[list[Point], list[Point]]:
    """Those of up to ``most`` bytes, and those that are left out. One block size after the other."""
    every = [Point(size, count, ids, layers) for size, count, ids in itertools.product(sizes, counts, patterns)]
    return [point for point in every if point.bytes <= most], [point for point in every if point.bytes > most]


def time_left(waiting: Sequence[Point], done: Sequence[Point], seconds: float) -> float:
    """Seconds that the points of ``waiting`` will take, if those of ``done`` took ``seconds``."""
    return seconds * sum(point.weight for point in waiting) / max(1, sum(point.weight for point in done))


def _run(generator: np.random.Generator, pool: int, count: int) -> np.ndarray:
    return int(generator.integers(1, pool - count + 1)) + np.arange(count)


def _scattered(generator: np.random.Generator, pool: int, count: int) -> np.ndarray:
    return 1 + generator.choice(pool - 1, count, replace=False)


def _half(generator: np.random.Generator, pool: int, count: int, whole: int) -> np.ndarray:
    run = _run(generator, pool, whole)
    others = np.setdiff1d(np.arange(1, pool), run, assume_unique=True)
    return np.concatenate([run, generator.choice(others, count - whole, replace=False)])


def numbers(text: str) -> list[int]:
    """``"2,16"``: whole numbers, each once. Raises ``ValueError``."""
    return list(dict.fromkeys(_positive(part) for part in text.split(",")))


def names(text: str, known: Sequence[str]) -> list[str]:
    """``"a,b"``: names of ``known``, each once. Raises ``ValueError``."""
    return list(dict.fromkeys(_known(text.split(","), known)))


def _positive(text: str) -> int:
    if not text.strip().isdigit() or not int(text):
        raise ValueError(f"{text.strip()!r} is no positive whole number")
    return int(text)


def _known(wanted: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    for name in (part.strip() for part in wanted):
        if name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
        yield name
