"""The hand-over as the client sees it: the engines' traces, and the time of the first token at the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.hand_over import CLIENT, LATE, PARTS, HandOver, hand_over_of, median_hand_over
from layerpush.apps.tracing.requests import RequestTrace, TraceSet, read_traces
from layerpush.telemetry.trace_records import SCHEDULER_RANK
from tests.unit.test_trace_breakdown import LOAD, PUSH, TOKEN
from tests.unit.trace_hosts import first_token, load, process, push, write

ARRIVED = 12.0


def traced(folder: Path, d: dict[str, Any] | None = None, p_ahead: float = 0.0) -> tuple[TraceSet, RequestTrace]:
    """A request of two hosts; ``p_ahead`` is P's clock less D's. ``d`` has other times of the load."""
    p_clock = "d-clock" if not p_ahead else "p-clock"
    ours = {name: at + p_ahead for name, at in PUSH.items()}
    write(folder / "p.jsonl", process("P", p_clock), push(**ours))
    write(folder / "d.jsonl", process("D", "d-clock"), load(clock_offset=p_ahead or None, **LOAD | (d or {})))
    write(folder / "s.jsonl", process("D", "d-clock", rank=SCHEDULER_RANK), first_token(**TOKEN))
    traces = read_traces([folder])
    (request,) = traces.requests
    return traces, request


def test_the_parts_of_a_hand_over_add_up_to_the_whole(tmp_path: Path) -> None:
    found = hand_over_of(*traced(tmp_path), ARRIVED, "d-clock")
    assert found is not None
    assert found.ms == 1e3 * (ARRIVED - PUSH["t_last_ready"])
    assert found.parts_ms[CLIENT] == 1e3 * (ARRIVED - TOKEN["t_first_token"])
    assert found.parts_ms[LATE] == 0.0
    assert list(found.parts_ms) == list(PARTS)
    assert sum(found.parts_ms.values()) == pytest.approx(found.ms)


def test_a_late_request_to_d_is_a_part_of_its_own(tmp_path: Path) -> None:
    found = hand_over_of(*traced(tmp_path, {"t_awaited": 6.0}), ARRIVED, "d-clock")
    assert found is not None
    assert (found.ms, found.parts_ms[LATE], found.parts_ms[CLIENT]) == (7000.0, 1000.0, 1000.0)
    assert sum(found.parts_ms.values()) == pytest.approx(found.ms)


@pytest.mark.parametrize(("clock", "ahead"), [("d-clock", 0.0), ("p-clock", 100.0)])
def test_the_client_may_run_on_the_host_of_p_or_of_d(tmp_path: Path, clock: str, ahead: float) -> None:
    found = hand_over_of(*traced(tmp_path, p_ahead=100.0), ARRIVED + ahead, clock)
    assert found is not None
    assert found.ms == pytest.approx(7000.0)
    assert sum(found.parts_ms.values()) == pytest.approx(found.ms)


def test_a_client_on_another_host_has_no_hand_over(tmp_path: Path) -> None:
    assert hand_over_of(*traced(tmp_path), ARRIVED, "client's clock") is None


def test_a_hand_over_without_records_of_d_has_no_parts(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", process("P", "x"), push(**PUSH))
    traces = read_traces([tmp_path])
    assert hand_over_of(traces, traces.requests[0], ARRIVED, "x") == HandOver(7000.0, {})
    assert hand_over_of(traces, RequestTrace("r", [push()]), ARRIVED, "x") is None


def test_medians() -> None:
    def one(ms: float) -> HandOver:
        return HandOver(ms, dict.fromkeys(PARTS, ms / 7))

    assert median_hand_over([one(7.0), one(70.0), one(14.0)]) == one(14.0)
    assert median_hand_over([one(7.0), HandOver(8.0, {})]) == HandOver(7.5, {})
    assert median_hand_over([]) is None
