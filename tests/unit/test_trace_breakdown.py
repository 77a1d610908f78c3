"""The time of a request: parts that follow each other and add up, even without some records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerpush.apps.tracing.breakdown import HAND_OVER, PARTS, break_down, medians, shares, slowest
from layerpush.apps.tracing.report import summary_data, summary_text
from layerpush.apps.tracing.requests import RequestTrace, read_traces
from layerpush.telemetry.trace_records import SCHEDULER_RANK, DropRecord
from tests.unit.trace_hosts import first_token, load, process, push, write

PUSH = {"t_first_planned": 2.0, "t_last_ready": 5.0, "t_last_landed": 5.5, "t_notified": 5.6}
LOAD = {"t_awaited": 1.0, "t_registered": 1.5, "t_settled": 6.5, "t_reported": 8.5}
TOKEN = {"t_all_reported": 8.75, "t_scheduled": 9.0, "t_first_token": 11.0}
UNSEEN = [None, None]
"""The parts after D's wait, without a record of D's scheduler."""


def request_of(
    pushes: list[dict[str, Any]],
    loads: list[dict[str, Any]],
    name: str = "r",
    token: dict[str, Any] | None = None,
) -> RequestTrace:
    tokens = [] if token is None else [first_token(name, **token)]
    return RequestTrace(name, [push(name, **one) for one in pushes], [load(name, **one) for one in loads], tokens)


def test_the_parts_of_a_request() -> None:
    one = break_down(request_of([PUSH], [LOAD], token=TOKEN))
    before = {"queue": 1.0, "prefill": 3.0}
    hand_over = {"exposed": 0.5, "notification": 1.0, "D wait": 2.25, "schedule": 0.25, "first step": 2.0}
    assert one.parts == before | hand_over
    assert (one.total, one.other) == (10.0, 0.0)


def test_the_hand_over_is_the_sum_of_its_parts() -> None:
    one = break_down(request_of([PUSH], [LOAD], token=TOKEN))
    assert one.hand_over == TOKEN["t_first_token"] - PUSH["t_last_ready"]
    assert one.hand_over == sum(part for name in HAND_OVER if (part := one.parts[name]) is not None)


def test_a_first_token_of_p_has_no_first_step() -> None:
    one = break_down(request_of([PUSH], [LOAD], token={"t_all_reported": 8.75, "t_first_token": 8.875}))
    assert (one.parts["schedule"], one.parts["first step"], one.other) == (0.125, 0.0, 0.0)
    assert one.hand_over == 8.875 - PUSH["t_last_ready"]


@pytest.mark.parametrize("lost", ["t_last_ready", "t_last_landed"])
def test_a_hand_over_with_an_unknown_part_is_unknown(lost: str) -> None:
    assert break_down(request_of([PUSH | {lost: None}], [LOAD], token=TOKEN)).hand_over is None
    assert break_down(request_of([PUSH], [LOAD])).hand_over is None


def test_a_hand_over_begins_with_ds_request_if_that_is_late() -> None:
    assert break_down(request_of([PUSH], [LOAD | {"t_awaited": 6.0}], token=TOKEN)).hand_over == 5.0


FAILED = LOAD | {"outcome": "failed"}
SLOW_P = {"t_first_planned": 2.5, "t_last_ready": 5.25, "t_last_landed": 6.0}
SLOW_D = {"t_awaited": 1.5, "t_settled": 7.0, "t_reported": 9.0}


@pytest.mark.parametrize(
    ("pushes", "loads", "parts", "total", "other"),
    [
        pytest.param([PUSH], [LOAD | {"t_awaited": 4.0}], [0.0, 1.0, 0.5, 1.0, 2.0], 4.5, 0.0, id="D asks late"),
        pytest.param([PUSH], [LOAD | {"t_awaited": 6.0}], [0.0, 0.0, 0.0, 0.5, 2.0], 2.5, 0.0, id="D asks at the end"),
        pytest.param([PUSH, SLOW_P], [LOAD, SLOW_D], [1.0, 3.25, 0.75, 1.0, 2.0], 8.0, 0.0, id="the slowest rank"),
        pytest.param([PUSH], [], [None, 3.0, 0.5, None, None], 3.5, 0.0, id="no record of D"),
        pytest.param([], [LOAD], [None, None, None, None, 2.0], 7.5, 5.5, id="no record of P"),
        pytest.param([{}], [], [None] * 5, 0.0, 0.0, id="nothing is known"),
        pytest.param(
            [{"t_last_landed": 5.5}], [LOAD], [None, None, None, 1.0, 2.0], 7.5, 4.5, id="layers are not told apart"
        ),
        pytest.param(
            [],
            [FAILED | {"t_registered": None, "t_settled": 1.25, "t_reported": 1.5}],
            [None, None, None, None, 0.25],
            0.5,
            0.25,
            id="a load that failed early",
        ),
        pytest.param(
            [PUSH],
            [FAILED | {"t_settled": 3.0, "t_reported": 3.5}],
            [1.0, 1.0, 0.0, 0.0, 0.5],
            2.5,
            0.0,
            id="D gives up",
        ),
        pytest.param(
            [PUSH | {"t_last_landed": 9.0}], [LOAD], [1.0, 3.0, 1.5, 0.0, 2.0], 7.5, 0.0, id="P notices after D"
        ),
        pytest.param([PUSH], [LOAD | {"t_settled": 5.25}], [1.0, 3.0, 0.25, 0.0, 3.25], 7.5, 0.0, id="a clock is off"),
    ],
)
def test_only_time_between_ds_request_and_its_report_counts(
    pushes: list[dict[str, Any]], loads: list[dict[str, Any]], parts: list[float | None], total: float, other: float
) -> None:
    one = break_down(request_of(pushes, loads))
    assert list(one.parts.values()) == [*parts, *UNSEEN]
    assert (one.total, one.other) == (total, other)


def three() -> list[RequestTrace]:
    """Requests of 7.5, 9.5 and 8.5 s; the second waits 4 s in D, the third failed without a push record."""
    failed = LOAD | {"outcome": "failed", "reason": "P is gone", "t_reported": 9.5}
    return [
        request_of([PUSH], [LOAD], "a"),
        request_of([PUSH], [LOAD | {"t_reported": 10.5}], "b"),
        request_of([], [failed], "c"),
    ]


def test_the_slowest_requests_come_first() -> None:
    assert [one.request.name for one in slowest(three(), 2)] == ["b", "c"]
    assert len(slowest(three(), 10)) == 3


def test_shares_of_the_total_time_add_up_to_one() -> None:
    taken = shares(slowest(three(), 2))
    assert taken["D wait"] == pytest.approx((4.0 + 3.0) / 18)
    assert taken["other"] == pytest.approx(5.5 / 18)
    assert sum(taken.values()) == pytest.approx(1.0)
    assert shares([]) == dict.fromkeys([*PARTS, "other"], 0.0)


def test_a_median_covers_only_requests_with_the_part() -> None:
    middle = medians(slowest(three(), 3))
    assert (middle["total"], middle["prefill"], middle["D wait"]) == (8.5, 3.0, 3.0)
    assert medians([break_down(request_of([PUSH], []))])["D wait"] is None


def folder(tmp_path: Path) -> Path:
    write(tmp_path / "p.jsonl", process("P", "x"), DropRecord(records=4, t=1.0), push("a", tokens=99, **PUSH))
    bad = load("b", outcome="failed", reason="P is gone", t_awaited=1.0, t_settled=1.002, t_reported=1.0034)
    write(tmp_path / "d.jsonl", process("D", "x"), load("a", **LOAD, verified_parts=24, verify_s=0.5), bad)
    write(tmp_path / "s.jsonl", process("D", "x", rank=SCHEDULER_RANK), first_token("a", **TOKEN))
    return tmp_path


def test_the_summary_is_a_table(tmp_path: Path) -> None:
    lines = summary_text(read_traces([folder(tmp_path)]), 10).splitlines()
    assert lines[0] == "2 requests: 1 completed, 1 failed"
    assert lines[1] == "P rank 0: 4 records were dropped (p.jsonl)"
    at = lines.index("the slowest 2, in milliseconds:")
    assert lines[at + 1].split() == ["request", "tokens", "pushed", "verified", "outcome", "total", "hand-over"]
    assert lines[at + 2].split() == ["1", "cmpl-a-0", "99", "layer", "24", "completed", "10000", "6000.0"]
    assert lines[at + 3].split() == ["2", "cmpl-b-0", "0", "?", "0", "failed", "3.4", "-"]
    assert lines[at + 4].split() == ["median", "of", "all", "5001.7", "6000.0"]
    assert {len(line) for line in lines[at + 1 : at + 5]} == {len(lines[at + 1])}, "columns are aligned"
    at = lines.index("the parts of their totals:")
    assert lines[at + 1].split() == ["D", "first"]
    assert lines[at + 2].split() == ["queue", "prefill", "exposed", "notification", "wait", "schedule", "step", "other"]
    parts = ["1000.0", "3000.0", "500.0", "1000.0", "2250.0", "250.0", "2000.0", "-"]
    assert lines[at + 3].split() == ["1", *parts]
    assert lines[at + 4].split() == ["2", *"----", "1.4", "-", "-", "2.0"]
    assert lines[at + 5].split()[:3] == ["median", "1000.0", "3000.0"]
    assert len({len(line) for line in lines[at + 2 : at + 5]}) == 1
    at = lines.index("their time: prefill 30%, D wait 23%, first step 20%, queue 10%, notification")
    assert lines[at + 1] == "  10%, exposed 5%, schedule 2%"
    assert lines[-1] == "cmpl-b-0 failed: P is gone"


def test_the_summary_fits_a_terminal_with_the_ids_of_a_router(tmp_path: Path) -> None:
    """vLLM's router makes ids of 99 characters, which begin with the addresses of P and D."""
    hosts, unique = "___prefill_addr_127.0.0.1:8100___decode_addr_127.0.0.1:8200_", "0123456789abcdef" * 2
    names = [f"{hosts}{unique[:-2]}{number:02}" for number in range(12)]
    slow = {field: 99.0 * at for field, at in LOAD.items()}
    loads = [load(name, **slow) for name in names]
    write(tmp_path / "d.jsonl", process("D" * 50, "x"), *loads)
    tokens = [first_token(name, **{field: 99.0 * at for field, at in TOKEN.items()}) for name in names]
    write(tmp_path / "s.jsonl", process("D", "x", rank=SCHEDULER_RANK), *tokens)
    pushes = [push(name, tokens=131072, **{field: 99.0 * at for field, at in PUSH.items()}) for name in names]
    write(tmp_path / "p.jsonl", process("P", "y"), *pushes)
    traces = read_traces([tmp_path])
    assert len(traces.requests[0].name) == 99
    lines = summary_text(traces, 12).splitlines()
    assert max(map(len, lines)) <= 80
    at = lines.index("the slowest 12, in milliseconds:")
    shown = [line.split()[1] for line in lines[at + 2 : at + 14]]
    assert [traces.find(one).name for one in shown] == [one.request.name for one in slowest(traces.requests, 12)]


def test_the_summary_is_available_as_data(tmp_path: Path) -> None:
    data = summary_data(read_traces([folder(tmp_path)]), 1)
    assert (data["requests"], data["outcomes"]) == (2, {"completed": 1, "failed": 1})
    (one,) = data["slowest"]
    assert (one["request"], one["total"], one["hand-over"], one["other"]) == ("cmpl-a-0", 10.0, 6.0, 0.0)
    assert (one["verified_parts"], one["verify_s"]) == (24, 0.5)
    assert data["notes"] == ["P rank 0: 4 records were dropped (p.jsonl)"]
    assert (data["shares"]["prefill"], data["median"]["hand-over"]) == (0.3, 6.0)
