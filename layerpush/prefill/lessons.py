"""What finished WRITEs teach of what copies and messages cost. Writer thread only."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace

from layerpush.prefill.costs import Costs

KEPT = 8


class Lesson:
    """The median of the last few observations. What was known before is the first of them."""

    def __init__(self, known: float) -> None:
        self._observed = deque([known], maxlen=KEPT)

    @property
    def value(self) -> float:
        return statistics.median_low(self._observed)

    def heard(self, observed: float) -> None:
        self._observed.append(max(observed, 0.0))


class CopyLessons:
    """Small copies teach what one costs whatever its size, large ones what a byte costs."""

    def __init__(self, known: Costs) -> None:
        self._copy_s, self._byte_s = Lesson(known.copy_s), Lesson(known.gather_s)

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
