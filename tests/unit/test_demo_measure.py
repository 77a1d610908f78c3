"""Answers and traces become samples: what is right, what is missing, what went another way than it should."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from layerpush.apps.demo import measure
from layerpush.apps.demo.load import Answer
from layerpush.apps.demo.measure import examine, result_of
from tests.unit.test_demo_figures import push_line

RIGHT = (4, 5, 6)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TRACE_TIMEOUT_S", 0.0)


def trace(directory: Path, *lines: dict[str, object]) -> None:
    (directory / "p-rank0-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def answer(tokens: tuple[int, ...] = RIGHT, request_id: str = "abc", ttft_s: float = 0.5) -> Answer:
    return Answer(request_id, tokens, ttft_s, 1.0)


def test_of_two_pushes_of_a_request_the_later_counts(tmp_path: Path):
    trace(tmp_path, push_line(outcome="failed"), push_line(request_id="cmpl-abc-0-11111111"))
    [sample] = examine([answer()], [RIGHT], tmp_path, "layer")
    assert sample.push is not None
    assert sample.push.request_id == "cmpl-abc-0-11111111"


def test_a_traced_and_right_answer_has_no_problem(tmp_path: Path):
    trace(tmp_path, push_line())
    [sample] = examine([answer()], [RIGHT], tmp_path, "layer")
    assert sample.tokens_equal
    assert sample.problem is None
    assert sample.figures is not None
    assert sample.figures.exposed_ms == pytest.approx(150)


def test_tokens_are_compared_one_by_one(tmp_path: Path):
    trace(tmp_path, push_line())
    [sample] = examine([answer(tokens=(4, 5, 7))], [RIGHT], tmp_path, "layer")
    assert not sample.tokens_equal


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"request_id": "cmpl-else-0-00000000"}, "no trace"),
        ({"mode": "request", "fallback": "short"}, "mode request .short."),
        ({"outcome": "failed", "reason": "peer lost"}, "peer lost"),
    ],
)
def test_what_went_wrong_with_a_push_is_said(tmp_path: Path, change: dict[str, object], problem: str):
    trace(tmp_path, push_line(**change))
    [sample] = examine([answer()], [RIGHT], tmp_path, "layer")
    assert sample.figures is None
    assert sample.problem is not None
    assert re.search(problem, sample.problem)
    assert result_of([sample]).problems == (sample.problem,)
    assert result_of([sample]).figures is None


def test_another_mode_is_no_problem_where_any_will_do(tmp_path: Path):
    trace(tmp_path, push_line(mode="request", fallback="short"))
    [sample] = examine([answer()], [RIGHT], tmp_path, None)
    assert sample.problem is None
    assert sample.figures is not None


def test_one_missing_trace_leaves_a_mode_without_figures(tmp_path: Path):
    trace(tmp_path, push_line())
    samples = examine([answer(), answer(request_id="lost", ttft_s=1.5)], [RIGHT, RIGHT], tmp_path, "layer")
    result = result_of(samples)
    assert result.ttft_ms == pytest.approx(1000)
    assert result.figures is None
    assert len(result.problems) == 1
