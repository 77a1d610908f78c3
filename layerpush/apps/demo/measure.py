"""The same prompts through every mode, in turn, with what each answer and each push showed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from layerpush.apps.demo.engines import Engine
from layerpush.apps.demo.load import Answer, complete, complete_disaggregated, vllm_request_id
from layerpush.apps.tracing.figures import Figures, TraceError, figures_of, median_figures, read_pushes
from layerpush.apps.tracing.requests import without_suffix
from layerpush.telemetry.trace_records import PushRecord

TRACE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Sample:
    """One prompt in one mode. ``problem`` says what is wrong with its trace, when something is."""

    prompt: int
    answer: Answer
    tokens_equal: bool
    push: PushRecord | None
    figures: Figures | None
    problem: str | None


@dataclass(frozen=True)
class ModeResult:
    """Medians over the prompts of a mode; ``figures`` is None when a trace is missing or wrong."""

    ttft_ms: float
    figures: Figures | None
    tokens_equal: bool
    problems: tuple[str, ...]


def result_of(samples: Sequence[Sample]) -> ModeResult:
    """Sum up one mode."""
    figures = [sample.figures for sample in samples if sample.figures is not None]
    return ModeResult(
        ttft_ms=1e3 * statistics.median(sample.answer.ttft_s for sample in samples),
        figures=median_figures(figures) if len(figures) == len(samples) else None,
        tokens_equal=all(sample.tokens_equal for sample in samples),
        problems=tuple(sample.problem for sample in samples if sample.problem),
    )


async def expected_tokens(
    session: aiohttp.ClientSession,
    plain: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    on_done: Callable[[], None],
) -> list[tuple[int, ...]]:
    """What one engine that does everything itself answers."""
    answers = []
    for prompt in prompts:
        answers.append((await complete(session, plain, prompt, max_tokens)).tokens)
        on_done()
    return answers


async def take_turns(
    session: aiohttp.ClientSession,
    prefills: Mapping[str, Engine],
    decode: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    on_done: Callable[[], None],
) -> dict[str, list[Answer]]:
    """Every prompt through every mode, one request at a time; answers per mode, in the order of the prompts.

    The modes take turns, and another one begins with each prompt: what disturbs the machine disturbs all of them.
    """
    modes = list(prefills)
    answers: dict[str, list[Answer]] = {mode: [] for mode in modes}
    for index, prompt in enumerate(prompts):
        first = index % len(modes)
        for mode in modes[first:] + modes[:first]:
            answers[mode].append(await complete_disaggregated(session, prefills[mode], decode, prompt, max_tokens))
            on_done()
    return answers


def examine(
    answers: Sequence[Answer], expected: Sequence[tuple[int, ...]], trace_dir: Path, push_mode: str | None
) -> list[Sample]:
    """Compare the answers of one mode with the right ones and find their traces, waiting for those that are late.

    A push that did not go as ``push_mode`` is a problem; None takes any, where falling back to another is no failure.
    """
    pushes = _await_traces(answers, trace_dir)
    samples = []
    for index, (answer, right) in enumerate(zip(answers, expected, strict=True)):
        push = pushes.get(vllm_request_id(answer.request_id))
        figures, problem = _judge(push, push_mode, answer, trace_dir)
        samples.append(Sample(index, answer, answer.tokens == right, push, figures, problem))
    return samples


def _await_traces(answers: Sequence[Answer], trace_dir: Path) -> dict[str, PushRecord]:
    """P writes the trace of a push at about the time when D begins to answer, so hardly any can be missing yet."""
    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while True:
        pushes = {without_suffix(push.request_id): push for push in read_pushes(trace_dir)}
        all_there = all(vllm_request_id(answer.request_id) in pushes for answer in answers)
        if all_there or time.monotonic() > deadline:
            return pushes
        time.sleep(0.05)


def _judge(
    push: PushRecord | None, push_mode: str | None, answer: Answer, trace_dir: Path
) -> tuple[Figures | None, str | None]:
    """Figures of a push that went as its mode promises, or what is wrong with it."""
    if push is None:
        return None, f"no trace of request {answer.request_id} in {trace_dir}"
    if push_mode is not None and push.mode != push_mode:
        return (
            None,
            f"request {answer.request_id} was pushed in mode {push.mode} ({push.fallback or 'no reason given'})",
        )
    try:
        return figures_of(push), None
    except TraceError as error:
        return None, str(error)
