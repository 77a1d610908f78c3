"""From answers and traces to samples: right ones, incomplete ones, and pushes that went another way than asked for."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest

from bench.demo import measure
from bench.demo.measure import examine, result_of
from bench.servers.load import GreedyAnswer
from layerpush.telemetry.trace_records import this_process
from tests.unit.test_demo_figures import push_line

RIGHT = (4, 5, 6)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TRACE_TIMEOUT_S", 0.0)


def trace(directory: Path, *lines: dict[str, object]) -> None:
    whole = [msgspec.to_builtins(this_process("prefill", 0)), *lines]
    (directory / "p-rank0-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in whole))


def answer(tokens: tuple[int, ...] = RIGHT, request_id: str = "abc", ttft_s: float = 0.5) -> GreedyAnswer:
    return GreedyAnswer(request_id, tokens, 11.0, 11.0 + ttft_s)


def test_the_later_of_two_pushes_of_a_request_counts(tmp_path: Path):
    trace(tmp_path, push_line(outcome="failed"), push_line(request_id="cmpl-abc-0-11111111"))
    [sample] = examine([answer()], [RIGHT], tmp_path, "layer")
    assert sample.push is not None
    assert sample.push.request_id == "cmpl-abc-0-11111111"


def test_a_correct_answer_with_a_trace_has_no_problem(tmp_path: Path):
    trace(tmp_path, push_line())
    [sample] = examine([answer()], [RIGHT], tmp_path, "layer")
    assert sample.tokens_equal
    assert sample.problem is None
    assert sample.figures is not None
    assert sample.figures.exposed_ms == pytest.approx(150)
    assert sample.hand_over is not None
    assert sample.hand_over.ms == pytest.approx(200), "the last layer at 11.3 s, the first token at 11.5 s"


def test_tokens_are_compared_one_by_one(tmp_path: Path):
    trace(tmp_path, push_line())
    [sample] = examine([answer(tokens=(4, 5, 7))], [RIGHT], tmp_path, "layer")
    assert not sample.tokens_equal


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"request_id": "cmpl-else-0-00000000", "decode_request_id": "cmpl-else-0-11111111"}, "no trace"),
        ({"mode": "request", "fallback": "short"}, "mode request .short."),
        ({"outcome": "failed", "reason": "peer lost"}, "peer lost"),
    ],
)
def test_the_problem_of_a_push_is_reported(tmp_path: Path, change: dict[str, object], problem: str):
    trace(tmp_path, push_line(**change))
    [sample] = examine([answer()], [RIGHT], tmp_path, "layer")
    assert sample.figures is None
    assert sample.problem is not None
    assert re.search(problem, sample.problem)
    assert result_of([sample]).problems == (sample.problem,)
    assert result_of([sample]).figures is None


def test_one_missing_trace_leaves_a_mode_without_figures(tmp_path: Path):
    trace(tmp_path, push_line())
    samples = examine([answer(), answer(request_id="lost", ttft_s=1.5)], [RIGHT, RIGHT], tmp_path, "layer")
    result = result_of(samples)
    assert (result.ttft_ms, result.ttft_range_ms) == (pytest.approx(1000), (pytest.approx(500), pytest.approx(1500)))
    assert result.figures is None
    assert result.hand_over is None
    assert len(result.problems) == 1


class Playing:
    """Stands in for the servers: keeps the prompts of each engine, and the mode that P was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alone: list[tuple[object, int]] = []
        self.pushed: list[tuple[int, str | None]] = []
        monkeypatch.setattr(measure, "complete", self.complete)
        monkeypatch.setattr(measure, "complete_disaggregated", self.complete_disaggregated)

    async def complete(self, _: object, engine: object, prompt: list[int], __: int) -> GreedyAnswer:
        self.alone.append((engine, prompt[0]))
        return answer(tokens=(prompt[0],))

    async def complete_disaggregated(
        self, _: object, p: object, d: object, prompt: list[int], __: int, mode: str | None
    ) -> GreedyAnswer:
        assert (p, d) == ("P", "D")
        self.pushed.append((prompt[0], mode))
        return answer(tokens=(prompt[0],))


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (1, {"P": [10], "D": [10]}),
        (2, {"P": [10], "D": [11]}),
        (5, {"P": [10, 12, 14], "D": [11, 13]}),
    ],
)
def test_p_and_d_share_the_prompts_that_are_computed_without_a_transfer(
    count: int, shares: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Each engine computes at least one, so its KV cache has been touched."""
    playing, done = Playing(monkeypatch), []
    prompts = [[10 + index] for index in range(count)]
    run = measure.expected_tokens(None, ("P", "D"), prompts, 3, lambda: done.append(1))
    assert asyncio.run(run) == [(10 + index,) for index in range(count)]
    assert {name: [prompt for engine, prompt in playing.alone if engine == name] for name in "PD"} == shares
    assert len(done) == max(2, count)


def test_modes_take_turns_and_each_prompt_starts_with_another_mode(monkeypatch: pytest.MonkeyPatch):
    playing = Playing(monkeypatch)
    run = measure.take_turns(None, "P", "D", ["a", "b", "c"], [[1], [2]], 3, lambda: None)
    answers = asyncio.run(run)
    assert playing.pushed == [(1, "a"), (1, "b"), (1, "c"), (2, "b"), (2, "c"), (2, "a")]
    assert {mode: [one.tokens for one in of] for mode, of in answers.items()} == {mode: [(1,), (2,)] for mode in "abc"}
