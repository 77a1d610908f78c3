"""The samples of one point, and its figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from bench.bootstrap import Ratio, ratio_of_medians
from bench.push.points import Point

FIXED = ("direct", "gathered", "packed")
AUTO = "auto"
WAYS = (*FIXED, AUTO)
LIMIT = 1.10
"""Auto may take so many times the time of the best plan, and of direct."""


@dataclass
class Series:
    """Samples of one way, round by round: from the decision until all has landed, and until the WRITE was posted.

    ``plans`` has the real plan of each WRITE: direct if staging memory has no room for it.
    """

    seconds: list[float] = field(default_factory=list)
    posted_s: list[float] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))


@dataclass(frozen=True)
class Cell:
    """All samples of a point, with the cost model's constants and estimates. Each round has another order of ways."""

    link: str
    point: Point
    ways: Mapping[str, Series]
    runs: Mapping[str, int]
    estimate_s: Mapping[str, float]
    costs: Mapping[str, float]

    @cached_property
    def possible(self) -> dict[str, Series]:
        """The fixed plans for which staging memory has room."""
        return {plan: self.ways[plan] for plan in FIXED if set(self.ways[plan].plans) == {plan}}

    @cached_property
    def best(self) -> str:
        """The fixed plan with the lowest median."""
        return min(self.possible, key=lambda plan: self.possible[plan].median_s)

    @property
    def chosen(self) -> str:
        """Auto's most frequent choice."""
        plans = self.ways[AUTO].plans
        return max(sorted(set(plans)), key=plans.count)

    @cached_property
    def auto_to_best(self) -> Ratio:
        return self.ratio(AUTO, self.best)

    @cached_property
    def auto_to_direct(self) -> Ratio:
        return self.ratio(AUTO, "direct")

    @property
    def misses(self) -> list[str]:
        """The limits that auto exceeds, in words. The best of several medians is a little too low by chance."""
        against = {f"the best plan ({self.best})": self.auto_to_best, "direct": self.auto_to_direct}
        return [f"{ratio.ratio:.2f} x {what}" for what, ratio in against.items() if ratio.ratio > LIMIT]

    @property
    def is_sure(self) -> bool:
        """Whether the whole interval of a missed limit is beyond it."""
        return any(ratio.low > LIMIT for ratio in (self.auto_to_best, self.auto_to_direct))

    @property
    def regret(self) -> float:
        """The cost of the choice alone: the median of auto's plan over that of the best plan."""
        return self.ways[self.chosen].median_s / self.ways[self.best].median_s

    def ratio(self, way: str, other: str) -> Ratio:
        """The ratio of the medians of two ways, with its interval."""
        return ratio_of_medians(self.ways[way].seconds, self.ways[other].seconds)

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Cell:
        """The inverse of ``as_json``."""
        point = Point(**{each.name: written[each.name] for each in fields(Point)})
        ways = {
            way: Series(**{each.name: series[each.name] for each in fields(Series)})
            for way, series in written["ways"].items()
        }
        return cls(written["link"], point, ways, written["runs"], written["estimate_s"], written["costs"])

    def as_json(self) -> dict[str, Any]:
        auto = {"to_best": asdict(self.auto_to_best), "to_direct": asdict(self.auto_to_direct)}
        ways = {
            way: {"median_s": series.median_s, "of_direct": asdict(self.ratio(way, "direct")), **asdict(series)}
            for way, series in self.ways.items()
        }
        return {
            "link": self.link,
            **asdict(self.point),
            "bytes": self.point.bytes,
            "best": self.best,
            "auto": {"chose": self.chosen, **auto, "misses": self.misses},
            "runs": dict(self.runs),
            "estimate_s": dict(self.estimate_s),
            "costs": dict(self.costs),
            "ways": ways,
        }


def summary(cells: Sequence[Cell]) -> str:
    """Auto's figures in some sentences."""
    met = sum(not cell.misses for cell in cells)
    sure = sum(cell.is_sure for cell in cells)
    best, direct = (max(getattr(cell, name).ratio for cell in cells) for name in ("auto_to_best", "auto_to_direct"))
    right = sum(cell.regret <= LIMIT for cell in cells)
    return in_words(len(cells), right, met, sure, best, direct)


def in_words(points: int, right: int, met: int, sure: int, best: float, direct: float) -> str:
    """The number of points, of right choices, of points within the limit and of points surely beyond it; the worst
    ratios of auto's time to the best plan's and to direct's.
    """
    return (
        f"Choice: at {right} of {points} points auto took the best plan, or one within {100 * (LIMIT - 1):.0f} % of "
        f"it. Time: at {met} points auto took at most {LIMIT:g} times as long as the best plan and as direct. At "
        f"{sure} points it took longer for sure: the whole 95 % interval is above {LIMIT:g}. Worst: {best:.2f} times "
        f"the best plan's time, and {direct:.2f} times direct's."
    )
