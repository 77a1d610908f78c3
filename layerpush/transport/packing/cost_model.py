"""What a WRITE costs by each plan: estimates from measured constants. Pure.

The model is that of ``docs/design/packing.md``: a WRITE of ``bytes`` in ``runs`` pieces, contiguous on both sides each,
takes ``write_s + scattered_s(runs) + bytes * wire_s`` seconds; to gather or to scatter, ``copy_s`` and so much for
each byte more; to pack, the way of two notifications, too.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

MARGIN = 0.9
"""A plan that copies must be estimated to take at most so much of the time of one that does not. A plan that is not
chosen teaches nothing, so it does not matter much if one is left out that is only a little faster."""


class Plan(enum.Enum):
    """How the blocks of a WRITE get from one cache to the other."""

    DIRECT = "direct"
    """From cache to cache."""
    GATHERED = "gathered"
    """Gathered into the staging ring of P, and from there into the cache of D."""
    PACKED = "packed"
    """From ring to ring, and scattered by D."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What there is to write: how many bytes, in how many contiguous runs by each plan."""

    bytes: int
    direct_runs: int
    gathered_runs: int
    packed_runs: int = 1

    def runs(self, plan: Plan) -> int:
        match plan:
            case Plan.DIRECT:
                return self.direct_runs
            case Plan.GATHERED:
                return self.gathered_runs
            case Plan.PACKED:
                return self.packed_runs


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: for so many descriptors that do not merge, ``(descriptors, seconds)``, ascending in both; for a byte on
    the wire, for a byte gathered on P, for a byte scattered on D, for the notifications of a packed WRITE there and
    back; for whatever size, for a copy and for a WRITE.
    """

    scattered: tuple[tuple[int, float], ...] = ((1000, 3e-3),)
    wire_s: float = 1 / 4e9
    gather_s: float = 1 / 4e9
    scatter_s: float = 1 / 4e9
    messages_s: float = 1e-3
    copy_s: float = 1e-4
    write_s: float = 1e-4

    def estimate(self, plan: Plan, shape: Shape) -> float:
        """Seconds from the decision until the blocks are in the cache of D."""
        seconds = self.write_s + self.scattered_s(shape.runs(plan)) + shape.bytes * self.wire_s
        if plan is not Plan.DIRECT:
            seconds += self.copy_s + shape.bytes * self.gather_s
        if plan is Plan.PACKED:
            seconds += self.copy_s + shape.bytes * self.scatter_s + self.messages_s
        return seconds

    def scattered_s(self, descriptors: int) -> float:
        """Straight lines through nothing for none and ``scattered``; beyond its end, as steep as the last."""
        at = min(bisect_left(self.scattered, (descriptors, 0.0)), len(self.scattered) - 1)
        low, low_s = self.scattered[at - 1] if at else (0, 0.0)
        high, high_s = self.scattered[at]
        return low_s + (descriptors - low) * (high_s - low_s) / (high - low)

    def never_pays(self, descriptors: int, size: int) -> bool:
        """Whether no plan that copies ``size`` bytes could be chosen, however so many descriptors lie. To look at how
        they do costs a tenth of a small WRITE.
        """
        best = self.estimate(Plan.GATHERED, Shape(size, descriptors, 1))
        return best >= MARGIN * self.estimate(Plan.DIRECT, Shape(size, descriptors, 1))

    def choose(self, shape: Shape, possible: Iterable[Plan]) -> Plan:
        """The plan that is estimated to be the fastest, direct unless another is so by more than the margin."""
        best = min(possible, key=lambda plan: self.estimate(plan, shape), default=Plan.DIRECT)
        if self.estimate(best, shape) < MARGIN * self.estimate(Plan.DIRECT, shape):
            return best
        return Plan.DIRECT
