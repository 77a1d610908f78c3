"""Time to first token of layer, chunk and request mode at several prompt lengths, on real vLLM engines."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.bootstrap import Ratio, ratio_of_medians
from layerpush.apps.demo.cluster import DEMO_SHAPE, MODES, Cluster
from layerpush.apps.demo.display import Display
from layerpush.apps.demo.engines import Engine, EngineFailedError, EngineGroup
from layerpush.apps.demo.interrupts import Interrupted, Interrupts
from layerpush.apps.demo.link import LinkError
from layerpush.apps.demo.load import RequestFailedError, complete_disaggregated, make_prompt
from layerpush.apps.demo.measure import Sample, examine, expected_tokens, take_turns
from layerpush.apps.demo.model import write_model
from layerpush.apps.demo.provenance import provenance
from layerpush.apps.demo.workspace import model_cache, places_of, work_directory

RESULTS = Path(__file__).parent / "results"
ANSWER_TOKENS = 8
DISTINCT_PROMPTS = 4
SHORT_PROMPT_TOKENS = 256
SHORT_PROMPT_FACTOR = 3
CONTROL = "request-again"
COMPARISONS = (("layer", "request"), ("chunk", "request"), ("layer", "chunk"), (CONTROL, "request"))

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Plan:
    """What is measured: modes with their connector configuration, prompt lengths in tokens, rounds per length."""

    modes: Mapping[str, Mapping[str, object]]
    lengths: Sequence[int]
    samples: int
    seed: int

    def rounds(self, length: int) -> int:
        """Short prompts are cheap and noisy: they get more rounds."""
        return self.samples * (SHORT_PROMPT_FACTOR if length <= SHORT_PROMPT_TOKENS else 1)

    def prompts(self, length: int) -> list[list[int]]:
        """The different prompts of a length; rounds go through them in turn."""
        return [make_prompt(length, self.seed + index, DEMO_SHAPE.vocabulary) for index in range(DISTINCT_PROMPTS)]


@dataclass(frozen=True)
class Cell:
    """All rounds of one prompt length: per mode one sample a round."""

    length: int
    samples: Mapping[str, Sequence[Sample]]

    def ttft_ms(self, mode: str) -> list[float]:
        return [1e3 * sample.answer.ttft_s for sample in self.samples[mode]]

    def exposed_ms(self, mode: str) -> float | None:
        """Median over the rounds; None when a trace is missing."""
        exposed = [sample.figures.exposed_ms for sample in self.samples[mode] if sample.figures]
        return float(np.median(exposed)) if len(exposed) == len(self.samples[mode]) else None

    def ratios(self) -> dict[str, Ratio]:
        """TTFT ratios between the modes that were measured."""
        pairs = [pair for pair in COMPARISONS if set(pair) <= set(self.samples)]
        return {f"{a}/{b}": ratio_of_medians(self.ttft_ms(a), self.ttft_ms(b)) for a, b in pairs}

    def wrong_tokens(self) -> list[str]:
        """Modes in which a token differed."""
        return [mode for mode, samples in self.samples.items() if not all(sample.tokens_equal for sample in samples)]

    def as_json(self) -> dict[str, Any]:
        modes = {}
        for mode, samples in self.samples.items():
            ttft = self.ttft_ms(mode)
            modes[mode] = {
                "ttft_ms": {"median": float(np.median(ttft)), "p90": float(np.percentile(ttft, 90)), "raw": ttft},
                "exposed_ms": {
                    "median": self.exposed_ms(mode),
                    "raw": [sample.figures.exposed_ms if sample.figures else None for sample in samples],
                },
                "pushed_as": Counter(sample.push.mode for sample in samples if sample.push),
                "writes": [sample.figures.writes if sample.figures else None for sample in samples],
                "trace_problems": [sample.problem for sample in samples if sample.problem],
            }
        ratios = {name: asdict(ratio) for name, ratio in self.ratios().items()}
        return {"prompt_tokens": self.length, "rounds": len(ttft), "modes": modes, "ttft_ratios": ratios}


@app.command()
def ttft(
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas.")
    ] = "16,64,256,1024,4096",
    samples: Annotated[
        int,
        typer.Option(
            min=1, help=f"Rounds per length; prompts of up to {SHORT_PROMPT_TOKENS} tokens get three times as many."
        ),
    ] = 20,
    layer_config: Annotated[
        str, typer.Option(metavar="JSON", help="More kv_connector_extra_config keys for layer mode.")
    ] = "{}",
    control: Annotated[
        bool, typer.Option("--control", help="Also measure a second prefill engine in request mode: shows the noise.")
    ] = False,
    link: Annotated[
        str | None, typer.Option(metavar="RATE", help="Emulate a link, for example 2gbit; needs root.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: bench/results/ttft-DATE.json.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    keep_logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep logs and traces in DIR.")] = None,
) -> None:
    """Measure time to first token by prompt length: layer, chunk and request mode, interleaved, on real engines.

    Exit status: 0 when measured, 1 when a token differed (then nothing is written), 2 when it could not be measured.
    """
    try:
        modes = {**MODES, "layer": {**MODES["layer"], **json.loads(layer_config)}}
        if control:
            modes[CONTROL] = MODES["request"]
        plan = Plan(modes, [int(length) for length in lengths.split(",")], samples, seed)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(f"--lengths or --layer-config: {error}") from error
    console = Console(soft_wrap=True)
    started_at = time.monotonic()
    try:
        with Interrupts() as interrupts, work_directory(keep_logs) as work, places_of(link, interrupts) as places:
            model = write_model(model_cache(), DEMO_SHAPE)
            cluster = Cluster(model, DEMO_SHAPE, int(1.2 * max(plan.lengths)), work / "trace", *places, modes=modes)
            cells = _run(Display(console), interrupts, cluster, plan)
    except Interrupted as interrupted:
        console.print(f"[yellow]{interrupted}; all servers are down.[/]")
        raise typer.Exit(interrupted.exit_status) from None
    except (EngineFailedError, RequestFailedError, LinkError, FileExistsError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    wrong = [f"{cell.length} tokens: {', '.join(cell.wrong_tokens())}" for cell in cells if cell.wrong_tokens()]
    if wrong:
        console.print(f"[red]Tokens differ from the plain engine's, so these numbers mean nothing:[/] {wrong}")
        raise typer.Exit(1)
    console.print(_medians(cells), _ratios(cells), sep="\n")
    path = out or RESULTS / f"ttft-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = provenance(seed) | {"link": link, "modes": modes, "model": asdict(DEMO_SHAPE)}
    seconds = {"seconds": round(time.monotonic() - started_at)}
    path.write_text(json.dumps(head | seconds | {"cells": [cell.as_json() for cell in cells]}, indent=1) + "\n")
    console.print(f"Written: {path}")


def _run(display: Display, interrupts: Interrupts, cluster: Cluster, plan: Plan) -> list[Cell]:
    with EngineGroup(cluster.trace_root.parent, interrupts) as group:
        plain, decode = group.start(cluster.plain()), group.start(cluster.decode())
        prefills = {mode: group.start(cluster.prefill(mode)) for mode in plan.modes}
        everybody = [plain, decode, *prefills.values()]
        with display.starting(everybody) as on_ready:
            group.wait_ready(everybody, on_ready)
        try:
            expected = asyncio.run(_expected(display, plain, plan))
            group.stop([plain])
            return asyncio.run(_measure(display, prefills, decode, cluster, plan, expected))
        except RequestFailedError:
            group.check_alive()  # a dead server explains more than the request that it cut off
            raise


async def _expected(display: Display, plain: Engine, plan: Plan) -> dict[int, list[tuple[int, ...]]]:
    """The right tokens of every distinct prompt, by prompt length."""
    async with aiohttp.ClientSession() as session:
        with display.counting("Plain engine: the expected tokens", DISTINCT_PROMPTS * len(plan.lengths)) as on_done:
            return {
                length: await expected_tokens(session, plain, plan.prompts(length), ANSWER_TOKENS, on_done)
                for length in plan.lengths
            }


async def _measure(
    display: Display,
    prefills: Mapping[str, Engine],
    decode: Engine,
    cluster: Cluster,
    plan: Plan,
    expected: Mapping[int, Sequence[tuple[int, ...]]],
) -> list[Cell]:
    warm_up = make_prompt(cluster.max_prompt_tokens, plan.seed, cluster.shape.vocabulary)
    cells = []
    async with aiohttp.ClientSession() as session:
        with display.counting("Warming up", len(prefills)) as on_done:
            for prefill in prefills.values():
                await complete_disaggregated(session, prefill, decode, warm_up, ANSWER_TOKENS)
                on_done()
        for length in plan.lengths:
            rounds = plan.rounds(length)
            prompts = [prompt for _ in range(rounds) for prompt in plan.prompts(length)][:rounds]
            right = (list(expected[length]) * rounds)[:rounds]
            with display.counting(f"{length} tokens", rounds * len(prefills)) as on_done:
                answers = await take_turns(session, prefills, decode, prompts, ANSWER_TOKENS, on_done)
            traced = {mode: examine(answers[mode], right, cluster.trace_dir(mode), None) for mode in prefills}
            cells.append(Cell(length, traced))
    return cells


def _medians(cells: Sequence[Cell]) -> Table:
    table = Table(title="Median time to first token, and median exposed time in brackets, in ms")
    table.add_column("prompt", justify="right")
    for mode in cells[0].samples:
        table.add_column(mode, justify="right")
    for cell in cells:
        exposed = [cell.exposed_ms(mode) for mode in cell.samples]
        brackets = ["(?)" if one is None else f"({one:.1f})" for one in exposed]
        medians = [f"{np.median(cell.ttft_ms(mode)):.1f}" for mode in cell.samples]
        table.add_row(str(cell.length), *(" ".join(pair) for pair in zip(medians, brackets, strict=True)))
    return table


def _ratios(cells: Sequence[Cell]) -> Table:
    table = Table(title="Ratio of median times to first token")
    for heading in ("prompt", "modes", "ratio", "95 % interval"):
        table.add_column(heading, justify="right")
    for cell in cells:
        for name, one in cell.ratios().items():
            table.add_row(str(cell.length), name, f"{one.ratio:.3f}", f"{one.low:.3f} to {one.high:.3f}")
        table.add_section()
    return table
