"""Growth of costs with layers, blocks, requests and ranks: straight lines through the samples. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.forward.cells import CaseSamples, Series

COSTS: Mapping[str, Callable[[Series], float]] = {
    "writer's processor time": lambda series: series.median("writer_s"),
    "exposed": lambda series: series.median("exposed_s"),
    "WRITEs": lambda series: series.median("writes"),
}
"""Costs of one forward with its push, in seconds; ``WRITEs`` is a number."""
COUNTED = {"WRITEs"}


@dataclass(frozen=True)
class Line:
    """``figure = intercept + slope * value``, by least squares; ``r2`` is the share of the variance that it explains.

    ``figures`` are in seconds; those of costs in ``COUNTED`` are numbers.
    """

    what: str
    mode: str
    cost: str
    values: tuple[int, ...]
    figures: tuple[float, ...]
    slope: float
    intercept: float
    r2: float


def fit(values: Sequence[float], figures: Sequence[float]) -> tuple[float, float, float]:
    """Slope, intercept and R2. Raises ``ValueError`` for fewer than two values."""
    if len(set(values)) < 2:
        raise ValueError(f"a line needs two points, not {list(values)}")
    slope, intercept = np.polyfit(values, figures, 1)
    measured = np.asarray(figures)
    residual = float(np.sum((measured - (slope * np.asarray(values) + intercept)) ** 2))
    spread = float(np.sum((measured - measured.mean()) ** 2))
    return float(slope), float(intercept), 1 - residual / spread if spread else 1.0


def lines(grown: Sequence[tuple[str, int, CaseSamples]]) -> Iterator[Line]:
    """A line for each thing that grew, mode and cost; ``grown`` has the thing, its value and the cell."""
    for what in dict.fromkeys(each for each, _, _ in grown):
        here = [(value, cell) for each, value, cell in grown if each == what]
        if len(here) < 2:
            continue
        values = tuple(value for value, _ in here)
        for mode in here[0][1].modes:
            for cost, of in COSTS.items():
                figures = tuple(of(cell.series[mode]) for _, cell in here)
                yield Line(what, mode, cost, values, figures, *fit(values, figures))
