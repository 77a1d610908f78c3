"""D's part of the hand-over: the scheduler's times of each load, and the loads that it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from layerpush.engine.scheduler.hand_overs import HandOvers
from layerpush.telemetry.metrics.catalog import (
    HAND_OVER,
    HAND_OVER_FIRST_STEP,
    HAND_OVER_REPORT,
    HAND_OVER_SCHEDULE,
    Metric,
)
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_records import FirstTokenRecord, clock_name

PARTS = (HAND_OVER_REPORT, HAND_OVER_SCHEDULE, HAND_OVER_FIRST_STEP)


@dataclass
class Request:
    request_id: str = "r"
    num_output_tokens: int = 0


class AwaitedLoad:
    """A scheduler that awaits one load, whose last completion is read at 10.0 s."""

    def __init__(self, clock: str | None = None) -> None:
        self.recorder = Recorder()
        self.records: list[FirstTokenRecord] = []
        self.hand_overs = HandOvers("D", self.recorder, self.records.append)
        self.request = Request()
        self.hand_overs.request_registered(self.request)
        self.hand_overs.load_completed("r", 10.0, clock_name() if clock is None else clock)

    def seconds(self) -> Callable[[Metric], list[float]]:
        """A metric's one observation since the last call, in a list; an empty list if there is none."""
        delta = self.recorder.take_delta()
        return lambda metric: [delta.observed(metric).total] * delta.observed(metric).count


def test_the_parts_add_up_to_the_whole() -> None:
    load = AwaitedLoad()
    load.hand_overs.loads_reported(["r"], set(), 10.25)
    load.hand_overs.requests_scheduled({"other"}, 10.5)
    load.hand_overs.requests_scheduled({"r", "other"}, 11.0)
    load.hand_overs.tick(11.5)
    load.hand_overs.requests_scheduled({"r"}, 12.0)  # its second chunk
    load.request.num_output_tokens = 1
    load.hand_overs.tick(13.0)
    seconds = load.seconds()
    assert [seconds(part) for part in PARTS] == [[0.25], [0.75], [2.0]]
    assert seconds(HAND_OVER) == [3.0] == [sum(seconds(part)[0] for part in PARTS)]
    (record,) = load.records
    assert (record.request_id, record.engine_id) == ("r", "D")
    assert (record.t_all_reported, record.t_scheduled, record.t_first_token) == (10.25, 11.0, 13.0)
    load.request.num_output_tokens = 2
    load.hand_overs.tick(14.0)
    load.hand_overs.request_finished("r", 15.0)
    assert (len(load.records), len(load.hand_overs)) == (1, 0)


def test_a_first_token_without_a_step_on_d_is_measured() -> None:
    load = AwaitedLoad()
    load.hand_overs.loads_reported(["r"], set(), 10.25)
    load.request.num_output_tokens = 1
    load.hand_overs.tick(10.5)
    seconds = load.seconds()
    assert [seconds(one) for one in (HAND_OVER, *PARTS)] == [[0.5], [0.25], [0.25], [0.0]]
    assert load.records[0].t_scheduled is None


def test_a_request_of_one_token_is_measured() -> None:
    """The engine finishes the request before it asks for metrics."""
    load = AwaitedLoad()
    load.hand_overs.loads_reported(["r"], set(), 10.25)
    load.hand_overs.requests_scheduled({"r"}, 10.5)
    load.request.num_output_tokens = 1
    load.hand_overs.request_finished("r", 11.0)
    load.hand_overs.tick(11.25)
    assert load.seconds()(HAND_OVER) == [1.0]
    assert [record.t_first_token for record in load.records] == [11.0]


def test_the_last_completion_of_several_ranks_counts() -> None:
    load = AwaitedLoad()
    load.hand_overs.load_completed("r", 10.5, clock_name())
    load.hand_overs.load_completed("r", 10.25, clock_name())
    load.hand_overs.loads_reported(["r"], set(), 11.0)
    load.request.num_output_tokens = 1
    load.hand_overs.tick(11.0)
    assert load.seconds()(HAND_OVER_REPORT) == [0.5]


def test_a_load_has_no_time_if_one_rank_has_another_clock() -> None:
    load = AwaitedLoad()
    load.hand_overs.load_completed("r", 10.5, "another")
    load.hand_overs.load_completed("r", 10.25, clock_name())
    load.hand_overs.loads_reported(["r"], set(), 11.0)
    load.request.num_output_tokens = 1
    load.hand_overs.tick(11.0)
    assert load.seconds()(HAND_OVER_REPORT) == []


def test_with_another_clock_only_the_schedulers_own_parts_are_measured() -> None:
    load = AwaitedLoad(clock="another host's")
    load.hand_overs.loads_reported(["r"], set(), 10.25)
    load.hand_overs.requests_scheduled({"r"}, 10.5)
    load.request.num_output_tokens = 1
    load.hand_overs.tick(11.5)
    seconds = load.seconds()
    assert (seconds(HAND_OVER), seconds(HAND_OVER_REPORT)) == ([], [])
    assert (seconds(HAND_OVER_SCHEDULE), seconds(HAND_OVER_FIRST_STEP)) == ([0.25], [1.0])


@pytest.mark.parametrize("how", ["failed", "aborted", "unknown"])
def test_failed_aborted_and_unknown_requests_are_not_measured(how: str) -> None:
    load = AwaitedLoad()
    if how == "failed":
        load.hand_overs.loads_reported(["r"], {"r"}, 10.25)
        load.request.num_output_tokens = 1  # D has computed the prompt itself
        load.hand_overs.tick(11.0)
    elif how == "aborted":
        load.hand_overs.loads_reported(["r"], set(), 10.25)
    else:
        load.hand_overs.load_completed("x", 1.0, clock_name())
        load.hand_overs.loads_reported(["x"], set(), 10.25)
    load.hand_overs.request_finished("r", 11.0)
    load.hand_overs.tick(12.0)
    assert load.records == []
    seconds = load.seconds()
    assert [seconds(one) for one in (HAND_OVER, *PARTS)] == [[], [], [], []]
    assert len(load.hand_overs) == 0
