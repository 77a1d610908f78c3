"""The speeds that the simulation gets from engines. Here simulated engines with known speeds play the real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.fleet.arrivals import Arrival
from bench.fleet.fleet import Fleet
from bench.fleet.validation import ALONE, ANSWER_TOKENS, MODES, STEP_TOKENS, EngineSpeeds, RequestSample, speeds
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


def test_the_steps_of_a_run_take_the_place_of_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = replace(KNOWN, token_s=1.0, step_gap_s=1.0).with_steps_of(alone(PushMode.LAYER, monkeypatch))
    assert len(slower.token_times) == sum(tokens // STEP_TOKENS for tokens in ALONE)
    assert slower.token_times == pytest.approx([KNOWN.token_s] * len(slower.token_times), rel=0.01)
    assert slower.step_gap_s == pytest.approx(KNOWN.step_gap_s, rel=0.1)
    turns = [Arrival(0.0, 1, ALONE[-1], ANSWER_TOKENS, 0)]
    simulated, wanted = (each.simulate(PushMode.LAYER, turns, 0.0)["ttft_s"] for each in (slower, KNOWN))
    assert simulated == pytest.approx(wanted, rel=0.01)


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
