"""Confidence intervals of medians, and of their ratios and differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
ROUND_RESAMPLES = 2_000
BLOCK_SAMPLES = 1 << 20


@dataclass(frozen=True)
class Ratio:
    """Median of one series over the median of another, with a 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Difference:
    """Median of one series less the median of another, with a 95 % interval."""

    difference: float
    low: float
    high: float


def ratio_of_medians(numerator: ArrayLike, denominator: ArrayLike, seed: int = 0, resamples: int = RESAMPLES) -> Ratio:
    """Percentile bootstrap over rounds: sample ``i`` of both series was taken in round ``i`` and stays with it.

    Rounds stay together, so a disturbance of both modes of a round cancels out.
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


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float


def median_of_rounds(rounds: Sequence[Sequence[float]]) -> Interval:
    """Median of all samples; the bootstrap draws whole rounds, whose samples share the same disturbances.

    Raises ``ValueError`` for rounds of unequal length, or empty ones.
    """
    samples = _equal_rounds(rounds)
    low, high = np.percentile(_medians(samples, _draws(len(samples))), [2.5, 97.5])
    return Interval(float(np.median(samples)), float(low), float(high))


def ratio_over_rounds(numerator: Sequence[Sequence[float]], denominator: Sequence[Sequence[float]]) -> Ratio:
    """As :func:`ratio_of_medians`, where a round has several samples of each."""
    above, below = _equal_rounds(numerator), _equal_rounds(denominator)
    if len(above) != len(below):
        raise ValueError(f"series of the same number of rounds are needed, not {len(above)} and {len(below)}")
    draws = _draws(len(above))
    low, high = np.percentile(_medians(above, draws) / _medians(below, draws), [2.5, 97.5])
    return Ratio(float(np.median(above) / np.median(below)), float(low), float(high))


def _equal_rounds(rounds: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    if not rounds or not rounds[0] or len({len(one) for one in rounds}) > 1:
        raise ValueError(f"rounds of the same length are needed, not {[len(one) for one in rounds]}")
    return np.asarray(rounds, dtype=float)


def _draws(rounds: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, rounds, size=(ROUND_RESAMPLES, rounds))


def _medians(samples: NDArray[np.float64], draws: NDArray[np.int64]) -> NDArray[np.float64]:
    """One median for each draw. All draws at once would take much memory, so this takes a block at a time."""
    blocks = np.array_split(draws, max(1, len(draws) * samples.size // BLOCK_SAMPLES))
    return np.concatenate([np.median(samples[block].reshape(len(block), -1), axis=1) for block in blocks])
