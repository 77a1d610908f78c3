"""The hand-overs of a call of bench.serve: the token of each push, and unknown hand-overs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.hand_over import CLIENT, PARTS, HandOver
from bench.serve.traces import Traces, hand_overs
from layerpush.telemetry.trace_records import SCHEDULER_RANK, PushRecord, clock_name
from tests.unit.trace_hosts import first_token, load, process, push, write

NAMES = ("a", "b", "c")
ARRIVED = (11.0, 22.0, 33.0)
"""The last layer of a request is ready at 10, 20 or 30 s; D's first token is there half a second later."""


def traced(folder: Path, clock: str | None = None, *, d: bool = True, lost: str = "") -> Traces:
    """An earlier call, and then the traces of three requests and of a probe."""
    clock = clock or clock_name()
    ready = {name: 10.0 * number for number, name in enumerate(NAMES, 1)} | {"probe-1": 5.0}

    def pushed(name: str, at: float) -> PushRecord:
        return push(name, t_first_planned=at - 1, t_last_ready=None if name == lost else at, t_last_landed=at + 0.125)

    write(folder / "p/p.jsonl", process("P", clock), pushed("earlier", 1.0))
    traces = Traces(folder / "p", folder / "d" if d else None, patience_s=0.0)
    write(folder / "p/q.jsonl", process("P", clock), *(pushed(name, at) for name, at in ready.items()))
    if d:
        loads = [load(name, t_awaited=at - 2, t_settled=at + 0.25) for name, at in ready.items()]
        tokens = [
            first_token(name, t_all_reported=at + 0.25, t_scheduled=at + 0.25, t_first_token=at + 0.5)
            for name, at in ready.items()
        ]
        write(folder / "d/d.jsonl", process("D", clock), *loads)
        write(folder / "d/s.jsonl", process("D", clock, rank=SCHEDULER_RANK), *tokens)
    return traces


def found(traces: Traces, arrived: tuple[float, ...], alone: bool) -> list[HandOver]:
    every, requests = traces.new(len(NAMES))
    assert every is not None
    assert {each.name for each in requests} == {f"cmpl-{name}-0" for name in NAMES}
    return hand_overs(every, requests, arrived, one_at_a_time=alone)


def test_each_of_several_consecutive_requests_has_its_own_hand_over(tmp_path: Path) -> None:
    each = found(traced(tmp_path), ARRIVED, alone=True)
    assert [one.ms for one in each] == [1000.0, 2000.0, 3000.0]
    assert [one.parts_ms[CLIENT] for one in each] == [500.0, 1500.0, 2500.0]
    assert all(sum(one.parts_ms.values()) == pytest.approx(one.ms) for one in each)


def test_concurrent_requests_have_only_a_mean_hand_over(tmp_path: Path) -> None:
    (mean,) = found(traced(tmp_path), ARRIVED, alone=False)
    assert (mean.ms, mean.parts_ms[CLIENT]) == (2000.0, 1500.0)
    assert sum(mean.parts_ms.values()) == pytest.approx(mean.ms)
    assert found(traced(tmp_path / "again"), (33.0, 11.0, 22.0), alone=False) == [mean], "in any order of tokens"


def test_without_the_trace_of_d_the_parts_are_unknown(tmp_path: Path) -> None:
    each = found(traced(tmp_path / "alone", d=False), ARRIVED, alone=True)
    assert each == [HandOver(1000.0, {}), HandOver(2000.0, {}), HandOver(3000.0, {})]
    assert found(traced(tmp_path / "together", d=False), ARRIVED, alone=False) == [HandOver(2000.0, {})]


@pytest.mark.parametrize("alone", [True, False])
def test_hand_overs_with_incomplete_data_are_left_out(tmp_path: Path, alone: bool) -> None:
    assert found(traced(tmp_path / "a", "another host's"), ARRIVED, alone) == []
    assert found(traced(tmp_path / "b", lost="b"), ARRIVED, alone) == []
    assert found(traced(tmp_path / "c"), ARRIVED[:2], alone) == []
    assert set(found(traced(tmp_path / "d"), ARRIVED, alone)[0].parts_ms) == set(PARTS)


def test_a_call_has_only_the_new_requests_and_no_probe(tmp_path: Path) -> None:
    traces = traced(tmp_path)
    assert [each.name for each in traces.new(3)[1]] == [f"cmpl-{name}-0" for name in NAMES]
    assert traces.new(1)[1] == []
    assert Traces(tmp_path / "none", None, patience_s=0.0).new(1) == (None, [])
