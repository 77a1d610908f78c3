"""Pushes and loads count once per engine, however many ranks share them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from layerpush.telemetry.metrics.catalog import BY_KEY, EXPOSED, FALLBACKS, LOAD, LOADS, PUSHES, TRANSFER
from layerpush.telemetry.metrics.endings import KEPT_S, Endings
from layerpush.telemetry.metrics.recorder import SEVERITY, Ending, Recorder
from layerpush.telemetry.metrics.tally import Tally


def push(outcome: str, name: str = "r", fallback: str | None = None, **times: float) -> Ending:
    return Ending(name, PUSHES.key, outcome, fallback, times)


def counted(ranks: int, *endings: Ending, steps: Sequence[float] = ()) -> Tally:
    """The engine's metrics after these endings, each in its own report, and after steps at these times."""
    recorder = Recorder()
    all_ranks = Endings(ranks, recorder)
    for ending in endings:
        all_ranks.reported(ending, 0.0)
    for now in steps:
        all_ranks.tick(now)
    return recorder.take()


def test_an_end_counts_after_the_report_of_the_last_rank() -> None:
    ends = [push("layerwise", exposed_seconds=at, transfer_seconds=1.0) for at in (0.1, 0.4, 0.2)]
    assert counted(3, *ends[:2]).is_empty
    tally = counted(3, *ends)
    assert tally.counters == {PUSHES.key: {"layerwise": 1}}
    assert (tally.observed(EXPOSED).count, tally.observed(EXPOSED).total) == (1, 0.4), "of the slowest rank"
    assert (tally.observed(TRANSFER).count, tally.observed(TRANSFER).total) == (1, 1.0)


def test_the_ranks_of_several_requests_may_report_in_any_order() -> None:
    for order in itertools.permutations([push("layerwise", "a"), push("whole", "b")] * 2):
        assert counted(2, *order).counters == {PUSHES.key: {"layerwise": 1, "whole": 1}}


def test_a_failure_on_one_rank_counts_as_a_failure_of_the_engine() -> None:
    completed, failed = push("layerwise", exposed_seconds=0.1, transfer_seconds=0.1), push("failed")
    for order in itertools.permutations([completed, completed, failed]):
        tally = counted(3, *order)
        assert tally.counters == {PUSHES.key: {"failed": 1}}
        assert not tally.histograms, "only completed pushes have times"


def test_a_fallback_on_any_rank_counts_once() -> None:
    late = push("late_registration", fallback="late_registration")
    for order in itertools.permutations([push("layerwise"), late, late]):
        assert counted(3, *order).counters == {
            PUSHES.key: {"late_registration": 1},
            FALLBACKS.key: {"late_registration": 1},
        }


def test_a_load_and_a_push_with_equal_names_count_separately() -> None:
    load = Ending("r", LOADS.key, "loaded", times={LOAD.key: 2.0})
    tally = counted(2, load, push("layerwise"), load, push("layerwise"))
    assert tally.counters == {PUSHES.key: {"layerwise": 1}, LOADS.key: {"loaded": 1}}
    assert (tally.observed(LOAD).count, tally.observed(LOAD).total) == (1, 2.0)


def test_an_end_without_reports_of_the_other_ranks_counts_after_a_timeout() -> None:
    """A request may be aborted before all ranks have begun it."""
    assert counted(2, push("cancelled"), steps=[KEPT_S - 1]).is_empty
    assert counted(2, push("cancelled"), steps=[KEPT_S, KEPT_S]).counters == {PUSHES.key: {"cancelled": 1}}


@pytest.mark.parametrize("metric", SEVERITY)
def test_every_outcome_has_a_severity(metric: str) -> None:
    assert sorted(SEVERITY[metric]) == sorted(BY_KEY[metric].values)
