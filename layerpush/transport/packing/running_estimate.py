"""Learns the costs of copies from finished WRITEs. Writer thread only."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from layerpush.transport.packing.cost_model import Costs

KEPT = 8
PRIOR = 3
FORGOTTEN_S = 10.0
"""Without an observation for this time, the initial value counts again. A plan that is never chosen gives no
observations, so an old bad one must not exclude it for ever."""


class RunningEstimate:
    """The median of the last ``KEPT`` observations. The initial value counts as ``PRIOR`` observations, so two outliers
    have no effect.
    """

    def __init__(self, initial: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._initial = initial
        self._clock = clock
        self._last_at = clock()
        self._observed = deque([initial] * PRIOR, maxlen=KEPT)

    @property
    def value(self) -> float:
        """The estimate now, in the unit of the initial value."""
        if self._clock() - self._last_at > FORGOTTEN_S:
            self._observed = deque([self._initial] * PRIOR, maxlen=KEPT)
        return statistics.median_low(self._observed)

    def add(self, observed: float) -> None:
        """An observation in the unit of the initial value; a negative one counts as 0."""
        self._observed.append(max(observed, 0.0))
        self._last_at = self._clock()


class CopyEstimates:
    """Small copies update the cost of a copy of any size, large ones the cost of a byte."""

    def __init__(self, known: Costs) -> None:
        self._copy_s, self._byte_s = RunningEstimate(known.copy_s), RunningEstimate(known.gather_s)

    def copied(self, size: int, seconds: float) -> None:
        """``size`` bytes were gathered in ``seconds``."""
        copy_s, bytes_s = self._copy_s.value, size * self._byte_s.value
        if bytes_s > copy_s:
            self._byte_s.add((seconds - copy_s) / size)
        else:
            self._copy_s.add(seconds - bytes_s)

    def applied_to(self, costs: Costs) -> Costs:
        """``costs`` with the current estimates."""
        return replace(costs, copy_s=self._copy_s.value, gather_s=self._byte_s.value)
