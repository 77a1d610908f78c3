"""Estimates the seconds that a WRITE takes by each plan, from measured costs. Pure.

The model is described in ``docs/design/packing.md``. A WRITE of ``bytes`` in ``runs`` contiguous runs takes
``write_s + scattered_s(runs) + bytes * wire_s``. A gather adds ``copy_s + bytes * gather_s``.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass

MARGIN = 0.9
"""A plan that copies is chosen only if its estimate is below this part of the direct plan's estimate."""


class Plan(enum.Enum):
    """The path of a WRITE's blocks from P's cache to D's."""

    DIRECT = "direct"
    """From cache to cache."""
    GATHERED = "gathered"
    """Gathered into the staging ring of P, and from there into the cache of D."""


@dataclass(frozen=True, slots=True)
class TransferSize:
    """The size of one WRITE: its bytes, and its number of contiguous runs by the plans that may need several."""

    bytes: int
    direct_runs: int
    gathered_runs: int

    def runs(self, plan: Plan) -> int:
        """The number of contiguous runs by this plan."""
        match plan:
            case Plan.DIRECT:
                return self.direct_runs
            case Plan.GATHERED:
                return self.gathered_runs


@dataclass(frozen=True, slots=True)
class Costs:
    """All in seconds.

    ``scattered`` has points ``(descriptors, seconds)`` for descriptors that do not merge, ascending in both. Per byte:
    ``wire_s`` on the wire, ``gather_s`` in a gather on P. For any size: ``copy_s`` for a copy, ``write_s`` for a WRITE.
    """

    scattered: tuple[tuple[int, float], ...] = ((1000, 3e-3),)
    wire_s: float = 1 / 4e9
    gather_s: float = 1 / 4e9
    copy_s: float = 1e-4
    write_s: float = 1e-4

    def estimate(self, plan: Plan, transfer: TransferSize) -> float:
        """Seconds from the decision until the blocks are in the cache of D."""
        seconds = self.write_s + self.scattered_s(transfer.runs(plan)) + transfer.bytes * self.wire_s
        if plan is not Plan.DIRECT:
            seconds += self.copy_s + transfer.bytes * self.gather_s
        return seconds

    def scattered_s(self, descriptors: int) -> float:
        """Interpolates ``(0, 0)`` and the points of ``scattered`` linearly; beyond them, extrapolates the last line."""
        at = min(bisect_left(self.scattered, (descriptors, 0.0)), len(self.scattered) - 1)
        low, low_s = self.scattered[at - 1] if at else (0, 0.0)
        high, high_s = self.scattered[at]
        return low_s + (descriptors - low) * (high_s - low_s) / (high - low)

    def never_pays(self, descriptors: int, size: int) -> bool:
        """Whether no plan that copies can be chosen for ``size`` bytes in ``descriptors`` descriptors, in any runs.

        If so, a caller need not count the runs, which takes a tenth of the time of a small WRITE.
        """
        best = self.estimate(Plan.GATHERED, TransferSize(size, descriptors, 1))
        return best >= MARGIN * self.estimate(Plan.DIRECT, TransferSize(size, descriptors, 1))

    def choose(self, transfer: TransferSize) -> Plan:
        """The gathered plan, or the direct plan if the gain is not above the margin."""
        gathered, direct = self.estimate(Plan.GATHERED, transfer), self.estimate(Plan.DIRECT, transfer)
        return Plan.GATHERED if gathered < MARGIN * direct else Plan.DIRECT
