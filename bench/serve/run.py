"""One call after the other: sends requests, reads metrics, compares answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.provenance import unplaced
from bench.serve.background import background
from bench.serve.driver import Driver, arguments
from bench.serve.hand_overs import hand_overs
from bench.serve.measured import Measured, measured
from bench.serve.plan import TOKEN, Call, Plan, Setup, seconds_left
from bench.serve.pushes import Pushes, figures_of_ranks
from bench.serve.report import Lines
from bench.serve.results import Wrong, by_cell
from bench.serve.scrape import BYTES, DESCRIPTORS, FIRST_TOKENS, PREFILL, TRANSFER, Meter, Tally, thread_cpu_s
from bench.serve.site import Site, Target, Targets
from layerpush.apps.tracing.figures import TraceError
from layerpush.engine.worker.thread_name import WRITER


class WrongAnswersError(Exception):
    """Answers of a mode differ from those that it must give."""

    def __init__(self, wrong: Sequence[Wrong]) -> None:
        super().__init__(f"{len(wrong)} answers differ from those of {wrong[0].reference}; {wrong[0]}")
        self.wrong = wrong


@dataclass
class Run:
    """A sweep over ``site``. ``calls`` are the finished ones."""

    plan: Plan
    site: Site
    driver: Driver
    lines: Lines
    calls: list[Measured] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._done: list[tuple[Call, float]] = []
        self._start_s: list[float] = []
        self._pushes: dict[str, Pushes] = {}

    def measure(self) -> None:
        """Make all calls. Raises ``WrongAnswersError``, and the errors of site and driver."""
        for setup in self.plan.setups:
            self.lines.setup(setup, self.plan.modes, len(list(self.plan.calls(setup))))
            began = time.monotonic()
            with self.site.up(setup, self.plan.modes) as targets:
                for mode in self.plan.modes:
                    self.site.only(mode)
                    self._warm_up(setup, targets[mode])
                    self.lines.warmed(mode)
                self._start_s.append(time.monotonic() - began)
                for call in self.plan.calls(setup):
                    self._measure(call, targets)

    def check_answers(self) -> None:
        """Compare all answers so far. Raises ``WrongAnswersError``."""
        cells = [cell for setup in self.plan.setups for cell in self.plan.cells(setup)]
        results = by_cell(cells, self.plan.modes, self.calls)
        if wrong := [each for result in results for each in result.wrong(self.plan.right)]:
            raise WrongAnswersError(wrong)

    def _measure(self, call: Call, targets: Targets) -> None:
        began = time.monotonic()
        self.site.only(call.mode)
        result = self._call(call, targets[call.mode])
        self._done.append((call, time.monotonic() - began))
        self.calls.append(result)
        self.lines.called(call, result, self._left_s())
        self.check_answers()

    def _warm_up(self, setup: Setup, target: Target) -> None:
        """Send one request more than fits at a time, so that all KV memory is used once."""
        call = self.plan.warm_up(setup, target.mode)
        requests = self.plan.streams + 1
        words = arguments(self.plan, call, target.url, self.site.model, requests)
        pushes = None if target.trace is None else Pushes(target.trace)
        measured(call, words, self.driver.run(words, f"warm-up-{setup.link}-{target.mode}", self.site.check))
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
        result = measured(call, [*map(unplaced, words)], found)
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

    def _left_s(self) -> float | None:
        """Seconds of the missing calls and of the engine starts before them."""
        waiting = [call for setup in self.plan.setups for call in self.plan.calls(setup)][len(self._done) :]
        starts = len(self.plan.setups) - len(self._start_s)
        left = seconds_left(self.plan, waiting, self._done)
        return None if left is None else left + starts * sum(self._start_s) / len(self._start_s)
