"""Sends the same prompts in every mode, in turn, and compares the answers and the pushes."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.figures import Figures, TraceError, figures_of, median_figures
from bench.hand_over import HandOver, hand_over_of, median_hand_over
from bench.servers.engines import EngineServer
from bench.servers.load import GreedyAnswer, complete, complete_disaggregated
from layerpush.apps.tracing.folder import FolderError
from layerpush.apps.tracing.requests import RequestTrace, TraceSet, read_traces
from layerpush.core.prefill_identity import remote_request_id
from layerpush.telemetry.trace_records import PushRecord, clock_name

TRACE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class DemoSample:
    """One prompt in one mode. ``problem``: the problem with its trace, if there is one.

    ``hand_over`` ends with the first token here: the demo is the client.
    """

    prompt: int
    answer: GreedyAnswer
    tokens_equal: bool
    push: PushRecord | None
    figures: Figures | None
    hand_over: HandOver | None
    problem: str | None


@dataclass(frozen=True)
class ModeResult:
    """Medians over the prompts of a mode; ``figures`` and ``hand_over`` are None when a trace is missing or wrong.

    ``ttft_range_ms``: the shortest and the longest.
    """

    ttft_ms: float
    ttft_range_ms: tuple[float, float]
    hand_over: HandOver | None
    figures: Figures | None
    tokens_equal: bool
    problems: tuple[str, ...]


def result_of(samples: Sequence[DemoSample]) -> ModeResult:
    """The medians and problems of one mode."""
    ttft = [1e3 * sample.answer.ttft_s for sample in samples]
    figures = [sample.figures for sample in samples if sample.figures is not None]
    hand_overs = [sample.hand_over for sample in samples if sample.hand_over is not None]
    whole = len(figures) == len(hand_overs) == len(samples)
    return ModeResult(
        ttft_ms=statistics.median(ttft),
        ttft_range_ms=(min(ttft), max(ttft)),
        hand_over=median_hand_over(hand_overs) if whole else None,
        figures=median_figures(figures) if whole else None,
        tokens_equal=all(sample.tokens_equal for sample in samples),
        problems=tuple(sample.problem for sample in samples if sample.problem),
    )


async def expected_tokens(
    session: aiohttp.ClientSession,
    engines: Sequence[EngineServer],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    on_done: Callable[[], None],
) -> list[tuple[int, ...]]:
    """The tokens without a transfer. The engines share the prompts; each gets one at least."""
    shares = [list(enumerate(prompts))[first :: len(engines)] for first in range(len(engines))]
    expected: dict[int, tuple[int, ...]] = {}

    async def answer(engine: EngineServer, share: Sequence[tuple[int, Sequence[int]]]) -> None:
        for index, prompt in share or [(0, prompts[0])]:
            expected[index] = (await complete(session, engine, prompt, max_tokens)).tokens
            on_done()

    await asyncio.gather(*(answer(engine, share) for engine, share in zip(engines, shares, strict=True)))
    return [expected[index] for index in range(len(prompts))]


async def take_turns(
    session: aiohttp.ClientSession,
    prefill: EngineServer,
    decode: EngineServer,
    modes: Sequence[str],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    on_done: Callable[[], None],
) -> dict[str, list[GreedyAnswer]]:
    """Every prompt through every mode, one request at a time; answers per mode, in the order of the prompts.

    The modes take turns, and another one begins with each prompt, so that a disturbance affects all modes.
    """
    answers: dict[str, list[GreedyAnswer]] = {mode: [] for mode in modes}
    for index, prompt in enumerate(prompts):
        first = index % len(modes)
        for mode in (*modes[first:], *modes[:first]):
            answers[mode].append(await complete_disaggregated(session, prefill, decode, prompt, max_tokens, mode))
            on_done()
    return answers


def examine(
    answers: Sequence[GreedyAnswer], expected: Sequence[tuple[int, ...]], folder: Path, mode: str
) -> list[DemoSample]:
    """Compare the answers of one mode with the expected tokens, and find their traces. Waits for late traces.

    ``folder`` has the ``trace_dir`` of P and of D.
    """
    traces = _await_traces(answers, folder)
    requests = {} if traces is None else {request.name: request for request in traces.requests}
    samples = []
    for index, (answer, right) in enumerate(zip(answers, expected, strict=True)):
        request = requests.get(remote_request_id(answer.request_id), RequestTrace(""))
        push = request.pushes[-1] if request.pushes else None
        figures, problem = _judge(push, mode, answer, folder)
        hand_over = None
        if figures is not None and traces is not None:
            hand_over = hand_over_of(traces, request, answer.first_token_at, clock_name())
        samples.append(DemoSample(index, answer, answer.tokens == right, push, figures, hand_over, problem))
    return samples


def _await_traces(answers: Sequence[GreedyAnswer], folder: Path) -> TraceSet | None:
    """Wait up to ``TRACE_TIMEOUT_S`` for the traces of these answers; returns all traces. None if there are none.

    P and D write them at about the time of D's first token, so the wait is short.
    """
    deadline, wanted = time.monotonic() + TRACE_TIMEOUT_S, {remote_request_id(answer.request_id) for answer in answers}
    while True:
        traces = None
        with contextlib.suppress(FolderError):
            traces = read_traces([folder])
            if wanted <= {request.name for request in traces.requests if request.pushes and request.first_tokens}:
                return traces
        if time.monotonic() > deadline:
            return traces
        time.sleep(0.05)


def _judge(push: PushRecord | None, mode: str, answer: GreedyAnswer, folder: Path) -> tuple[Figures | None, str | None]:
    """Figures of a push in the right mode, else its problem."""
    if push is None:
        return None, f"no trace of request {answer.request_id} in {folder}"
    if push.mode != mode:
        reason = push.fallback or "no reason given"
        return None, f"request {answer.request_id} was pushed in mode {push.mode} ({reason})"
    try:
        return figures_of(push), None
    except TraceError as error:
        return None, str(error)
