"""The cost of a WRITE by each plan: its descriptors on the wire, and the time of a gather."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NEWEST = 0.25
"""Weight of the newest copy in the estimate."""
LEAP = 4.0
"""A copy counts as at most this many times slower than estimated, now or at start: one may be an accident."""


def runs(*sides: NDArray[np.int32]) -> int:
    """Count the runs in block ids of equal shape ``(n,)``. In a run the ids of all ``sides`` ascend by one, and NIXL
    merges it into one descriptor.
    """
    if not len(sides[0]):
        return 0
    breaks = np.zeros(len(sides[0]) - 1, dtype=bool)
    for ids in sides:
        breaks |= np.diff(ids) != 1
    return 1 + int(np.count_nonzero(breaks))


class CopyCost:
    """Seconds of a gather: ``copy_s`` for any size, and ``byte_s`` per byte, as measured at start, times a factor that
    gathered WRITEs teach. Writer thread only.
    """

    def __init__(self, copy_s: float, byte_s: float) -> None:
        self._copy_s = copy_s
        self._byte_s = byte_s
        self._factor = 1.0

    def at_start(self, size: int) -> float:
        """Seconds for ``size`` bytes, as measured at start."""
        return self._copy_s + size * self._byte_s

    def seconds(self, size: int) -> float:
        """Seconds for ``size`` bytes, by the estimate of now."""
        return self._factor * self.at_start(size)

    def copied(self, size: int, seconds: float) -> None:
        """``size`` bytes were gathered in ``seconds``."""
        expected = self.at_start(size)
        if expected > 0:
            measured = min(seconds / expected, LEAP * max(self._factor, 1.0))
            self._factor += NEWEST * (measured - self._factor)
