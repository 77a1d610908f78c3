"""From calls to figures: by cell and mode, with intervals, ratios and the comparison of answers. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bench.bootstrap import Interval, difference_of_medians, median, ratio_of_medians
from bench.hand_over import PARTS
from bench.serve.measured import Measured
from bench.serve.plan import AGGREGATED, TOKEN, Cell

MEASURES = (
    "ttft_ms",
    "tpot_ms",
    "requests_per_s",
    "prefill_ms",
    "exposed_ms",
    "hand_over_ms",
    "after_prefill_ms",
)
COMPARED = MEASURES[:5]
"""Measures with ratios between all modes."""
AUTO = "auto"
TTFT_LIMIT, PREFILL_LIMIT = 1.0, 1.01
"""Limits of ``auto``, as ratios: time to first token to the best other mode's, prefill to ``request``'s."""
AFTER_PREFILL_LIMIT_MS, TOKEN_LIMIT, TOKEN_LIMIT_FROM = 15.0, 1.02, 2048
"""Limits of ``token``, against one engine: the difference in time to first token less prefill, and the ratio of times
to first token for prompts of at least so many tokens."""


@dataclass(frozen=True)
class MeasureSeries:
    """One measure in one mode: the samples of each round."""

    rounds: Sequence[Sequence[float]]

    @cached_property
    def p50(self) -> Interval:
        return median(self.rounds)

    def as_json(self) -> dict[str, Any]:
        """``low`` and ``high`` are the 95 % interval of ``p50``."""
        return self.p50.as_json("p50") | {"raw": [list(one) for one in self.rounds]}


@dataclass(frozen=True)
class Wrong:
    """An answer that is not that of ``reference``, a mode."""

    cell: Cell
    round: int
    mode: str
    request: int
    reference: str
    right: str
    answer: str

    def __str__(self) -> str:
        where = f"{self.mode} at {self.cell}, round {self.round}, request {self.request}"
        return f"{where}: {_short(self.answer)} instead of {_short(self.right)}"


@dataclass(frozen=True)
class CellResult:
    """All calls of a cell: ``calls[mode][round]``."""

    cell: Cell
    calls: Mapping[str, Sequence[Measured]]

    def series(self, mode: str, measure: str) -> MeasureSeries | None:
        """The samples of a measure in a mode; None if a round lacks them."""
        return _series([getattr(call, measure) for call in self.calls[mode]])

    def part(self, mode: str, name: str) -> MeasureSeries | None:
        """The samples of a part of the hand-over in a mode, in milliseconds; None if a round lacks them."""
        return _series([call.hand_over_parts_ms.get(name) for call in self.calls[mode]])

    def ratio(self, measure: str, mode: str, other: str) -> Interval | None:
        """The ratio of medians; None if one of them is not known, or if the divisor has a sample of 0."""
        if not {mode, other} <= set(self.calls):
            return None
        above, below = self.series(mode, measure), self.series(other, measure)
        if above is None or below is None or min(map(min, below.rounds)) <= 0:
            return None
        return ratio_of_medians(above.rounds, below.rounds)

    def ratios(self) -> dict[str, dict[str, Interval]]:
        """By measure, then by ``mode/other``."""
        pairs = list(itertools.permutations(self.calls, 2))
        return {
            measure: {f"{a}/{b}": ratio for a, b in pairs if (ratio := self.ratio(measure, a, b)) is not None}
            for measure in COMPARED
        }

    @property
    def best(self) -> str | None:
        """The mode with the lowest median time to first token, without ``auto``, ``token`` and aggregated."""
        left_out = (AGGREGATED, AUTO, TOKEN)
        found = {mode: self.series(mode, "ttft_ms") for mode in self.calls if mode not in left_out}
        medians = {mode: series.p50.value for mode, series in found.items() if series is not None}
        return min(medians, key=medians.__getitem__, default=None)

    @property
    def misses(self) -> list[str]:
        """The surely exceeded limits, in words: the whole 95 % interval is beyond the limit."""
        missed = []
        first = None if self.best is None else self.ratio("ttft_ms", AUTO, self.best)
        if first is not None and first.low > TTFT_LIMIT:
            missed.append(f"the first token of {AUTO} takes {first} x the time of {self.best}'s")
        prefill = self.ratio("prefill_ms", AUTO, "request")
        if prefill is not None and prefill.low > PREFILL_LIMIT:
            missed.append(f"prefill of {AUTO} takes {prefill} x the time of request's")
        against_one = self.ratio("ttft_ms", TOKEN, AGGREGATED)
        if self.cell.prompt_tokens >= TOKEN_LIMIT_FROM and against_one is not None and against_one.low > TOKEN_LIMIT:
            missed.append(f"the first token of {TOKEN} takes {against_one} x the time of one engine's")
        longer = self.longer_after_prefill(TOKEN)
        if longer is not None and longer.low > AFTER_PREFILL_LIMIT_MS:
            missed.append(
                f"{TOKEN} takes {longer.value:.1f} [{longer.low:.1f}, {longer.high:.1f}] ms longer than one "
                "engine from prefill to the first token"
            )
        return missed

    def longer_after_prefill(self, mode: str) -> Interval | None:
        """Time to first token less prefill, less that of one engine, in milliseconds; None if not known.

        Unlike the hand-over, one engine has it too: it does not record when its last layer is ready.
        """
        if not {mode, AGGREGATED} <= set(self.calls):
            return None
        ours, one = (self.series(each, "after_prefill_ms") for each in (mode, AGGREGATED))
        if ours is None or one is None:
            return None
        ours_by_round, one_by_round = ([float(np.median(each)) for each in series.rounds] for series in (ours, one))
        return difference_of_medians(ours_by_round, one_by_round)

    def wrong(self, reference_of: Callable[[str], str] = lambda _: AGGREGATED) -> Iterator[Wrong]:
        """Answers that differ from those of the mode ``reference_of(mode)``, of all rounds in which it has answered."""
        for mode, calls in self.calls.items():
            reference = reference_of(mode)
            right = {call.round: call.answers for call in self.calls.get(reference, ())}
            for call in calls:
                pairs = zip(call.answers, right.get(call.round, call.answers), strict=True)
                for number, (answer, expected) in enumerate(pairs):
                    if answer != expected:
                        yield Wrong(self.cell, call.round, mode, number, reference, expected, answer)

    def as_json(self) -> dict[str, Any]:
        setup, load = self.cell.setup, self.cell.load
        return {
            "link": setup.link,
            "max_num_batched_tokens": setup.step_tokens,
            "prompt_tokens": self.cell.prompt_tokens,
            "concurrency": load.concurrency,
            "background_streams": load.background,
            "rounds": len(self.calls[AGGREGATED]),
            "requests": len(self.calls[AGGREGATED][0].ttft_ms),
            "modes": {mode: self._mode_json(mode) for mode in self.calls},
            "ratios": {
                measure: {name: ratio.as_json("ratio") for name, ratio in ratios.items()}
                for measure, ratios in self.ratios().items()
            },
            "best": self.best,
            "misses": self.misses,
        }

    def _mode_json(self, mode: str) -> dict[str, Any]:
        calls = self.calls[mode]
        series = {measure: self.series(mode, measure) for measure in MEASURES}
        longer = self.longer_after_prefill(mode)
        return {
            **{measure: each and each.as_json() for measure, each in series.items()},
            "hand_over_parts_ms": {name: part.p50.value for name in PARTS if (part := self.part(mode, name))},
            "longer_after_prefill_ms": longer and longer.as_json("difference"),
            "pushed_as": dict(sum((Counter(call.pushed_as) for call in calls), Counter())),
            "first_tokens": dict(sum((Counter(call.first_tokens) for call in calls), Counter())),
            "problems": [problem for call in calls for problem in call.problems],
            "argv": calls[0].argv,
        }


def by_cell(cells: Sequence[Cell], modes: Sequence[str], calls: Sequence[Measured]) -> list[CellResult]:
    """The results of all cells with calls, in the order of ``cells``; rounds in order."""
    results = []
    for cell in cells:
        here = sorted((call for call in calls if call.cell == cell.key), key=lambda call: call.round)
        found = {mode: [call for call in here if call.mode == mode] for mode in modes}
        if here:
            results.append(CellResult(cell, {mode: each for mode, each in found.items() if each}))
    return results


def compared(results: Sequence[CellResult], reference_of: Callable[[str], str] = lambda _: AGGREGATED) -> int:
    """The number of answers that were compared with those of another mode."""
    return sum(
        len(call.answers)
        for result in results
        for mode, calls in result.calls.items()
        for call in calls
        if mode != reference_of(mode)
    )


def _series(rounds: Sequence[Sequence[float] | None]) -> MeasureSeries | None:
    there = [one for one in rounds if one]
    return MeasureSeries(there) if len(there) == len(rounds) and len(set(map(len, there))) == 1 else None


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
