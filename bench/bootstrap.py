"""How sure a ratio of medians, or their difference, is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """Median of one series over the median of another, with a 95 % interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Median of one series less the median of another, with a 95 % interval."""

    difference: float
    low: float
    high: float


def ratio_of_medians(numerator: ArrayLike, denominator: ArrayLike, seed: int = 0, resamples: int = RESAMPLES) -> Ratio:
    """Percentile bootstrap over rounds: sample ``i`` of both series was taken in round ``i`` and stays with it.

    Keeping rounds together lets a disturbance that hit both modes of a round cancel out.
    Raises ``ValueError`` for series of unequal length, or empty ones.
    """
    above, below, rounds = _rounds(numerator, denominator, seed, resamples)
    ratios = np.median(above[rounds], axis=1) / np.median(below[rounds], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(above) / np.median(below)), float(low), float(high))


def difference_of_medians(
    minuend: ArrayLike, subtrahend: ArrayLike, seed: int = 0, resamples: int = RESAMPLES
) -> Difference:
    """As :func:`ratio_of_medians`."""
    more, less, rounds = _rounds(minuend, subtrahend, seed, resamples)
    differences = np.median(more[rounds], axis=1) - np.median(less[rounds], axis=1)
    low, high = np.percentile(differences, [2.5, 97.5])
    return Difference(float(np.median(more) - np.median(less)), float(low), float(high))


def _rounds(
    first: ArrayLike, second: ArrayLike, seed: int, resamples: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    one, other = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if one.shape != other.shape or one.ndim != 1 or one.size == 0:
        raise ValueError(f"two series of the same length are needed, not {one.shape} and {other.shape}")
    return one, other, np.random.default_rng(seed).integers(0, one.size, size=(resamples, one.size))
