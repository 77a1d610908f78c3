"""Calls of bench.serve without engines: results as ``vllm bench serve`` writes them, and a site of stubs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.serve.measured import Measured, measured
from bench.serve.plan import AGGREGATED, Call, Cell, Pace, Setup, SweepPlan
from bench.serve.site import ServedMode, Targets

SETUP = Setup("loopback", 512)
CELL = Cell(SETUP, 1024, Pace(concurrency=1))
MODES = (AGGREGATED, "request", "layer")


def plan(**changes: Any) -> SweepPlan:
    usual: dict[str, Any] = {
        "modes": MODES,
        "lengths": [1024],
        "loads": [Pace(concurrency=1)],
        "setups": [SETUP],
        "rounds": 3,
        "requests": 2,
        "answer_tokens": 5,
        "seed": 7,
    }
    return SweepPlan(**usual | changes)


def result(ttfts_s: Sequence[float], answers: Sequence[str] | None = None, **changes: Any) -> dict[str, Any]:
    """A file of ``--save-result --save-detailed``: answers of 5 tokens, 10 ms after one another."""
    usual = {
        "duration": 2.0,
        "completed": len(ttfts_s),
        "failed": 0,
        "errors": [""] * len(ttfts_s),
        "ttfts": list(ttfts_s),
        "start_times": [100.0 + 10.0 * number for number in range(len(ttfts_s))],
        "latencies": [each + 0.04 for each in ttfts_s],
        "output_lens": [5] * len(ttfts_s),
        "generated_texts": list(answers or [f"right {number}" for number in range(len(ttfts_s))]),
    }
    return usual | changes


def call(mode: str, number: int, ttfts_s: Sequence[float], answers: Sequence[str] | None = None) -> Measured:
    return measured(Call(CELL, number, mode), ["--backend", "openai"], result(ttfts_s, answers))


@dataclass
class StubClient:
    """Answers at once. ``answers`` by mode."""

    answers: dict[str, list[str]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def run(self, words: Sequence[str], name: str, watch: Callable[[], None]) -> dict[str, Any]:
        watch()
        self.names.append(name)
        requests = int(words[words.index("--num-prompts") + 1])
        mode = words[words.index("--base-url") + 1].removeprefix("http://")
        answers = self.answers.get(mode, [])
        texts = [f"right {number}" for number in range(requests)]
        return result([0.5] * requests, [*answers, *texts[len(answers) :]])

    @property
    def measured(self) -> list[str]:
        return [name for name in self.names if not name.startswith("warm-up")]


@dataclass
class StubSite:
    """A site without servers: nothing listens at its URLs ``http://MODE``."""

    model: Sequence[str] = ()
    ups: list[tuple[Setup, list[str]]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def up(self, setup: Setup, modes: Sequence[str]) -> Iterator[Targets]:
        self.ups.append((setup, list(modes)))
        yield {mode: ServedMode(mode, f"http://{mode}") for mode in modes}

    def only(self, mode: str) -> None:
        self.turns.append(mode)

    def check(self) -> None:
        pass
