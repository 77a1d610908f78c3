"""How sure a ratio of medians is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """Median of one series over the median of another, with a 95 % interval."""

    ratio: float
    low: float
    high: float


def ratio_of_medians(numerator: ArrayLike, denominator: ArrayLike, seed: int = 0, resamples: int = RESAMPLES) -> Ratio:
    """Percentile bootstrap over rounds: sample ``i`` of both series was taken in round ``i`` and stays with it.

    Keeping rounds together lets a disturbance that hit both modes of a round cancel out.
    Raises ``ValueError`` for series of unequal length, or empty ones.
    """
    above, below = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    if above.shape != below.shape or above.ndim != 1 or above.size == 0:
        raise ValueError(f"two series of the same length are needed, not {above.shape} and {below.shape}")
    rounds = np.random.default_rng(seed).integers(0, above.size, size=(resamples, above.size))
    ratios = np.median(above[rounds], axis=1) / np.median(below[rounds], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(above) / np.median(below)), float(low), float(high))
