"""Pushes and loads count once per engine, however many ranks share them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from layerpush.telemetry.metrics.catalog import BY_KEY, EXPOSED, FALLBACKS, LOAD, LOADS, PUSHES, TRANSFER
from layerpush.telemetry.metrics.ended_counts import KEPT_S, EndedCounts
from layerpush.telemetry.metrics.metric_delta import MetricDelta
from layerpush.telemetry.metrics.recorder import SEVERITY, Ended, Recorder


def push(outcome: str, name: str = "r", fallback: str | None = None, **times: float) -> Ended:
    return Ended(name, PUSHES.key, outcome, fallback, times)


def counted(ranks: int, *endings: Ended, steps: Sequence[float] = ()) -> MetricDelta:
    """The engine's metrics after these endings, each in its own report, and after steps at these times."""
    recorder = Recorder()
    all_ranks = EndedCounts(ranks, recorder)
    for ending in endings:
        all_ranks.report_ended(ending, 0.0)
    for now in steps:
        all_ranks.tick(now)
    return recorder.take_delta()


def test_an_end_counts_after_the_report_of_the_last_rank() -> None:
    ends = [push("layerwise", exposed_seconds=at, transfer_seconds=1.0) for at in (0.1, 0.4, 0.2)]
    assert counted(3, *ends[:2]).is_empty
    delta = counted(3, *ends)
    assert delta.counters == {PUSHES.key: {"layerwise": 1}}
    assert (delta.observed(EXPOSED).count, delta.observed(EXPOSED).total) == (1, 0.4), "of the slowest rank"
    assert (delta.observed(TRANSFER).count, delta.observed(TRANSFER).total) == (1, 1.0)


def test_the_ranks_of_several_requests_may_report_in_any_order() -> None:
    for order in itertools.permutations([push("layerwise", "a"), push("whole", "b")] * 2):
        assert counted(2, *order).counters == {PUSHES.key: {"layerwise": 1, "whole": 1}}


def test_a_failure_on_one_rank_counts_as_a_failure_of_the_engine() -> None:
    completed, failed = push("layerwise", exposed_seconds=0.1, transfer_seconds=0.1), push("failed")
    for order in itertools.permutations([completed, completed, failed]):
        delta = counted(3, *order)
        assert delta.counters == {PUSHES.key: {"failed": 1}}
        assert not delta.histograms, "only completed pushes have times"


def test_a_fallback_on_any_rank_counts_once() -> None:
    late = push("late_registration", fallback="late_registration")
    for order in itertools.permutations([push("layerwise"), late, late]):
        assert counted(3, *order).counters == {
            PUSHES.key: {"late_registration": 1},
            FALLBACKS.key: {"late_registration": 1},
        }


def test_a_load_and_a_push_with_equal_names_count_separately() -> None:
    load = Ended("r", LOADS.key, "loaded", times={LOAD.key: 2.0})
    delta = counted(2, load, push("layerwise"), load, push("layerwise"))
    assert delta.counters == {PUSHES.key: {"layerwise": 1}, LOADS.key: {"loaded": 1}}
    assert (delta.observed(LOAD).count, delta.observed(LOAD).total) == (1, 2.0)


def test_an_end_without_reports_of_the_other_ranks_counts_after_a_timeout() -> None:
    """A request may be aborted before all ranks have begun it."""
    assert counted(2, push("cancelled"), steps=[KEPT_S - 1]).is_empty
    assert counted(2, push("cancelled"), steps=[KEPT_S, KEPT_S]).counters == {PUSHES.key: {"cancelled": 1}}


@pytest.mark.parametrize("metric", SEVERITY)
def test_every_outcome_has_a_severity(metric: str) -> None:
    assert sorted(SEVERITY[metric]) == sorted(BY_KEY[metric].values)
