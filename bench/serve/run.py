"""One call after the other: sends requests, reads metrics, compares answers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.figures import TraceError, figures_of
from bench.provenance import unplaced
from bench.serve.background import background
from bench.serve.driver import Driver, arguments
from bench.serve.measured import Measured, measured
from bench.serve.plan import TOKEN, Call, Setup, SweepPlan
from bench.serve.results import Wrong, by_cell
from bench.serve.scrape import FIRST_TOKENS, PREFILL, Meter
from bench.serve.site import ServedMode, Site, Targets
from bench.serve.traces import Traces, hand_overs


class WrongAnswersError(Exception):
    """Answers of a mode differ from those that it must give."""

    def __init__(self, wrong: Sequence[Wrong]) -> None:
        super().__init__(f"{len(wrong)} answers differ from those of {wrong[0].reference}; {wrong[0]}")
        self.wrong = wrong


@dataclass
class Run:
    """A sweep over ``site``. ``calls`` are the finished ones. ``say`` gets a line for each of them."""

    plan: SweepPlan
    site: Site
    driver: Driver
    say: Callable[[str], None]
    calls: list[Measured] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._traces: dict[str, Traces] = {}

    def measure(self) -> None:
        """Make all calls. Raises ``WrongAnswersError``, and the errors of site and driver."""
        for setup in self.plan.setups:
            calls = list(self.plan.calls(setup))
            self.say(f"{setup}: {len(calls)} calls of vllm bench serve in {len(self.plan.modes)} modes")
            with self.site.up(setup, self.plan.modes) as targets:
                for mode in self.plan.modes:
                    self.site.only(mode)
                    self._warm_up(setup, targets[mode])
                    self.say(f"  {mode} warmed up")
                for number, call in enumerate(calls, 1):
                    self._measure(call, targets, f"{number}/{len(calls)}")

    def check_answers(self) -> None:
        """Compare all answers so far. Raises ``WrongAnswersError``."""
        cells = [cell for setup in self.plan.setups for cell in self.plan.cells(setup)]
        results = by_cell(cells, self.plan.modes, self.calls)
        if wrong := [each for result in results for each in result.wrong(self.plan.right)]:
            raise WrongAnswersError(wrong)

    def _measure(self, call: Call, targets: Targets, number: str) -> None:
        self.site.only(call.mode)
        result = self._call(call, targets[call.mode])
        self.calls.append(result)
        where = f"{call.cell.prompt_tokens} tokens, {call.cell.load}, round {call.round}"
        self.say(f"  {number} {where}: {call.mode:10} first token after {statistics.median(result.ttft_ms):.0f} ms")
        for problem in result.problems:
            self.say(f"    {problem}")
        self.check_answers()

    def _warm_up(self, setup: Setup, target: ServedMode) -> None:
        """Send one request more than fits at a time, so that all KV memory is used once."""
        call = self.plan.warm_up(setup, target.mode)
        requests = self.plan.streams + 1
        words = arguments(self.plan, call, target.url, self.site.model, requests)
        traces = None if target.trace is None else Traces(target.trace, target.decode_trace)
        measured(call, words, self.driver.run(words, f"warm-up-{setup.link}-{target.mode}", self.site.check))
        if traces is not None:
            self._traces[target.mode] = traces
            traces.new(requests)

    def _call(self, call: Call, target: ServedMode) -> Measured:
        requests = self.plan.prompts(call)
        prefills = Meter(target.prefill, PREFILL)
        origins = Meter(target.decode if target.mode == TOKEN else None, FIRST_TOKENS)
        words = arguments(self.plan, call, target.url, self.site.model)
        with background(target.decode or "", call.cell.load.background, self.site.check):
            found = self.driver.run(words, call.key, self.site.check)
        result = measured(call, [*map(unplaced, words)], found)
        if (prefill := prefills.since(requests)).get("count"):
            result.prefill_ms = [1e3 * prefill["sum"] / prefill["count"]]
        result.first_tokens = {origin: int(count) for origin, count in origins.since(requests).items()}
        if target.mode in self._traces:
            self._add_pushes(result, call, requests)
        result.problems += [*prefills.problems, *origins.problems]
        return result

    def _add_pushes(self, result: Measured, call: Call, requests: int) -> None:
        traces, here = self._traces[call.mode].new(requests)
        result.pushed_as = dict(Counter(request.pushes[0].mode for request in here))
        if traces is None or len(here) != requests:
            result.problems.append(f"the trace has {len(here)} pushes of {requests} requests")
            return
        try:  # of several ranks the slowest counts
            result.exposed_ms = [max(figures_of(push).exposed_ms for push in request.pushes) for request in here]
        except TraceError as error:
            result.problems.append(str(error))
            return
        one_at_a_time = call.cell.load.concurrency == 1
        if found := hand_overs(traces, here, result.first_token_at, one_at_a_time=one_at_a_time):
            result.add_hand_overs(found)
        else:
            result.problems.append("no hand-over: P's clock is not this machine's, or its trace lacks a time")
