"""Medians of rounds, and their ratios and differences, with 95 % intervals.

A series has a sample for each round, or as many samples in each round. The bootstrap draws whole rounds, whose samples
share the same disturbances, so a disturbance of both series of a round cancels out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2_000


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def as_json(self, name: str) -> dict[str, float]:
        """The value has this name."""
        return {name: self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median(rounds: ArrayLike) -> Interval:
    """Raises ``ValueError``, as all functions here, for rounds of unequal length, or none."""
    return _bootstrap(lambda medians: medians, rounds)


def ratio_of_medians(numerator: ArrayLike, denominator: ArrayLike) -> Interval:
    return _bootstrap(operator.truediv, numerator, denominator)


def difference_of_medians(minuend: ArrayLike, subtrahend: ArrayLike) -> Interval:
    return _bootstrap(operator.sub, minuend, subtrahend)


def _bootstrap(figure: Callable[..., Any], *series: ArrayLike) -> Interval:
    """``figure`` gets medians, one of each series."""
    arrays = [np.asarray(one, dtype=float) for one in series]
    rounds = {len(one) for one in arrays}
    if len(rounds) > 1 or not all(one.size for one in arrays):
        raise ValueError(f"series of the same number of rounds are needed, not {[one.shape for one in arrays]}")
    draws = np.random.default_rng(0).integers(0, len(arrays[0]), size=(RESAMPLES, len(arrays[0])))
    drawn = figure(*(np.median(one[draws].reshape(RESAMPLES, -1), axis=1) for one in arrays))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(float(figure(*map(np.median, arrays))), float(low), float(high))
