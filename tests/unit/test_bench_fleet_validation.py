"""The speeds that the simulation gets from engines. Here simulated engines with known speeds play the real ones."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from bench.fleet.arrivals import Arrival, arrivals
from bench.fleet.fleet import Fleet
from bench.fleet.recorded import step_gaps
from bench.fleet.validation import (
    ALONE,
    ANSWER_TOKENS,
    MODES,
    PROMPTS,
    EngineSpeeds,
    RequestSample,
    link_speed,
    speeds,
    steps_of,
)
from bench.servers.load import GreedyAnswer
from layerpush.core.push_mode import PushMode
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import PushRecord

KNOWN = EngineSpeeds(token_s=500e-6, step_gap_s=5e-3, link=45e6, write_s=2e-3, decode_s=10e-3, other_s=40e-3)


def alone(mode: PushMode, patch: pytest.MonkeyPatch) -> list[RequestSample]:
    """One request at a time, of each length."""
    pushes: list[PushRecord] = []
    patch.setattr(TraceFile, "enabled", True)  # records have their WRITEs
    patch.setattr(Fleet, "push_ended", lambda self, record: pushes.append(record))
    found = []
    for tokens in ALONE:
        simulated = KNOWN.simulate(mode, [Arrival(0.0, 1, tokens, ANSWER_TOKENS, 0)], 0.0)
        answer = GreedyAnswer("r", (), 0.0, simulated["ttft_s"][0])
        ended_at = answer.first_token_at + (ANSWER_TOKENS - 1) * KNOWN.decode_s
        found.append(RequestSample(0.0, mode, tokens, answer, ended_at, pushes.pop()))
    patch.undo()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_simulated_with_its_own_layers(mode: PushMode, monkeypatch: pytest.MonkeyPatch) -> None:
    pushes, turns = dict[str, PushRecord](), list(arrivals(PROMPTS, 4.0, 0.0, 10.0, Random(0)))
    monkeypatch.setattr(TraceFile, "enabled", True)
    monkeypatch.setattr(Fleet, "push_ended", lambda _, record: pushes.update({record.request_id: record}))
    KNOWN.simulate(mode, turns, 0.0)
    monkeypatch.undo()
    in_order = [pushes[name] for name in sorted(pushes, key=lambda name: int(name[1:].partition(".")[0]))]
    series = list[RequestSample]()
    for turn, push in zip(turns, in_order, strict=True):
        answer = GreedyAnswer("r", (), 1.0 + turn.at - 1e-3, 0.0)  # P gets it later than it is sent
        series.append(RequestSample(turn.at, mode, turn.tokens, answer, 0.0, push))
    steps = steps_of(series)
    unknown = replace(KNOWN, token_s=1.0)  # the times are the run's
    found = sorted(unknown.simulate(mode, turns, 0.0, steps)["exposed_s"])
    assert found == pytest.approx(sorted(each.exposed_s for each in series), rel=0.05)  # the writer polls anew
    assert fmean(step_gaps(steps)) == pytest.approx(KNOWN.step_gap_s)
    assert link_speed(series) == pytest.approx(KNOWN.link, rel=0.03)


def test_speeds_of_single_requests_are_those_of_their_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    found = speeds([sample for mode in MODES for sample in alone(mode, monkeypatch)])
    assert found == replace(
        KNOWN,
        token_s=pytest.approx(KNOWN.token_s, rel=0.01),
        step_gap_s=pytest.approx(KNOWN.step_gap_s, rel=0.1),
        link=pytest.approx(KNOWN.link, rel=0.02),
        write_s=pytest.approx(KNOWN.write_s, abs=1e-3),
        decode_s=pytest.approx(KNOWN.decode_s),
        other_s=pytest.approx(KNOWN.other_s, abs=15e-3),
    )
