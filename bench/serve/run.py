"""One call after the other: sends requests, reads metrics, compares answers, keeps results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.provenance import unplaced
from bench.serve.background import background
from bench.serve.driver import Driver, arguments
from bench.serve.hand_overs import hand_overs
from bench.serve.measured import Measured, measured
from bench.serve.parts import Parts
from bench.serve.plan import TOKEN, Call, Plan, Setup, seconds_left
from bench.serve.pushes import Pushes, figures_of_ranks
from bench.serve.report import Lines
from bench.serve.results import Wrong, by_cell
from bench.serve.scrape import BYTES, DESCRIPTORS, FIRST_TOKENS, PREFILL, TRANSFER, Meter, Tally, thread_cpu_s
from bench.serve.site import Site, Target, Targets
from layerpush.apps.tracing.figures import TraceError
from layerpush.worker.thread_name import WRITER


class WrongAnswersError(Exception):
    """Answers of a mode differ from those that it must give."""

    def __init__(self, wrong: Sequence[Wrong]) -> None:
        super().__init__(f"{len(wrong)} answers differ from those of {wrong[0].reference}; {wrong[0]}")
        self.wrong = wrong


@dataclass
class Run:
    """A sweep over ``site``, without the calls that ``parts`` has already."""

    plan: Plan
    site: Site
    driver: Driver
    parts: Parts
    lines: Lines

    def __post_init__(self) -> None:
        self._done: list[tuple[Call, float]] = []
        self._start_s: list[float] = []
        self._pushes: dict[str, Pushes] = {}

    def measure(self) -> None:
        """Make all missing calls. Raises ``WrongAnswersError``, and the errors of site and driver."""
        self.check_answers()
        for setup in self.plan.setups:
            waiting = self._missing(setup)
            if not waiting:
                continue
            modes = [mode for mode in self.plan.modes if any(call.mode == mode for call in waiting)]
            self.lines.setup(setup, modes, len(waiting))
            began = time.monotonic()
            with self.site.up(setup, modes) as targets:
                for mode in modes:
                    self.site.only(mode)
                    self._warm_up(setup, targets[mode])
                    self.lines.warmed(mode)
                self._start_s.append(time.monotonic() - began)
                self._measure(waiting, targets)
            self.parts.starts += 1

    def check_answers(self) -> None:
        """Compare all answers so far. Raises ``WrongAnswersError``."""
        cells = [cell for setup in self.plan.setups for cell in self.plan.cells(setup)]
        results = by_cell(cells, self.plan.modes, self.parts.calls)
        if wrong := [each for result in results for each in result.wrong(self.plan.right)]:
            raise WrongAnswersError(wrong)

    def _measure(self, waiting: Sequence[Call], targets: Targets) -> None:
        for call in waiting:
            began = time.monotonic()
            self.site.only(call.mode)
            result = self._call(call, targets[call.mode])
            self._done.append((call, time.monotonic() - began))
            self.parts.save(call.key, result)
            self.lines.called(call, result, self._left_s())
            self.check_answers()

    def _warm_up(self, setup: Setup, target: Target) -> None:
        """Send one request more than fits at a time, so that all KV memory is used once."""
        call = self.plan.warm_up(setup, target.mode)
        requests = self.plan.streams + 1
        words = arguments(self.plan, call, target.url, self.site.model, requests)
        pushes = None if target.trace is None else Pushes(target.trace)
        measured(call, words, 0, self.driver.run(words, f"warm-up-{setup.link}-{target.mode}", self.site.check))
        if pushes is not None:
            self._pushes[target.mode] = pushes
            pushes.new(requests)

    def _call(self, call: Call, target: Target) -> Measured:
        requests = self.plan.prompts(call)
        prefills = Meter(target.prefill, [PREFILL])
        transfers = Meter(target.transfers if target.trace is None else None, [TRANSFER, BYTES, DESCRIPTORS])
        origins = Tally(target.decode if target.mode == TOKEN else None, FIRST_TOKENS, "origin")
        cpu_s = thread_cpu_s(target.processes(), WRITER)
        words = arguments(self.plan, call, target.url, self.site.model)
        with background(target.decode or "", call.cell.load.background, self.site.check):
            found = self.driver.run(words, call.key, self.site.check)
        result = measured(call, [*map(unplaced, words)], self.parts.starts, found)
        result.add_prefills(prefills.since(requests).get(PREFILL))
        result.add_transfers(transfers.since(requests))
        result.first_tokens = origins.since(requests)
        if target.mode in self._pushes:
            self._add_pushes(result, call, target, requests)
        result.problems += [*prefills.problems, *transfers.problems]
        cpu_after_s = thread_cpu_s(target.processes(), WRITER)
        if cpu_s is not None and cpu_after_s is not None:
            result.writer_cpu_ms = [1e3 * (cpu_after_s - cpu_s) / requests]
        return result

    def _add_pushes(self, result: Measured, call: Call, target: Target, requests: int) -> None:
        here = self._pushes[target.mode].new(requests)
        result.pushed_as = dict(Counter(parts[0].mode for parts in here))
        result.plans = dict(Counter(write.plan for parts in here for push in parts for write in push.writes))
        try:
            figures = [figures_of_ranks(parts) for parts in here]
        except TraceError as error:
            result.problems.append(str(error))
            return
        if len(figures) != requests:
            result.problems.append(f"the trace has {len(figures)} pushes of {requests} requests")
            return
        result.add_figures(figures)
        assert target.trace is not None
        one_at_a_time = call.cell.load.concurrency == 1
        found = hand_overs(target.trace, target.decode_trace, here, result.first_token_at, one_at_a_time=one_at_a_time)
        if found:
            result.add_hand_overs(found)
        else:
            result.problems.append("no hand-over: P's clock is not this machine's, or its trace lacks a time")

    def _missing(self, setup: Setup) -> list[Call]:
        have = self.parts.have
        return [call for call in self.plan.calls(setup) if call.key not in have]

    def _left_s(self) -> float | None:
        """Seconds of the missing calls and of the engine starts before them."""
        waiting = [self._missing(setup) for setup in self.plan.setups]
        current = self._done[-1][0].cell.setup
        starts = sum(bool(calls) and setup != current for setup, calls in zip(self.plan.setups, waiting, strict=True))
        left = seconds_left(self.plan, [call for calls in waiting for call in calls], self._done)
        if left is None:
            return None
        return left + starts * sum(self._start_s) / len(self._start_s)
