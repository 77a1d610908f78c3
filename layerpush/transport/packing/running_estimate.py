"""What finished WRITEs teach of what copies and messages cost. Writer thread only."""

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
"""A plan that is not chosen teaches nothing: what was learned last is no reason to leave it out for ever."""


class RunningEstimate:
    """The median of the last few observations; what was known before counts as three of them, so that two accidents
    are not believed.
    """

    def __init__(self, known: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._known = known
        self._clock = clock
        self._heard_at = clock()
        self._observed = deque([known] * PRIOR, maxlen=KEPT)

    @property
    def value(self) -> float:
        if self._clock() - self._heard_at > FORGOTTEN_S:
            self._observed = deque([self._known] * PRIOR, maxlen=KEPT)
        return statistics.median_low(self._observed)

    def heard(self, observed: float) -> None:
        self._observed.append(max(observed, 0.0))
        self._heard_at = self._clock()


class CopyEstimates:
    """Small copies teach what one costs whatever its size, large ones what a byte costs."""

    def __init__(self, known: Costs) -> None:
        self._copy_s, self._byte_s = RunningEstimate(known.copy_s), RunningEstimate(known.gather_s)

    def copied(self, size: int, seconds: float) -> None:
        """``size`` bytes were gathered: from the decision until they could be posted."""
        copy_s, bytes_s = self._copy_s.value, size * self._byte_s.value
        if bytes_s > copy_s:
            self._byte_s.heard((seconds - copy_s) / size)
        else:
            self._copy_s.heard(seconds - bytes_s)

    def applied_to(self, costs: Costs) -> Costs:
        """``costs`` with what is known by now. D's memory is taken to be like ours."""
        return replace(costs, copy_s=self._copy_s.value, gather_s=self._byte_s.value, scatter_s=self._byte_s.value)
