"""``layerpush demo``: real servers, three ways to push, one table."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from layerpush.apps.demo.cluster import DEMO_SHAPE, MODES, TOKENS_PER_STEP, Cluster
from layerpush.apps.demo.display import Display
from layerpush.apps.demo.engines import Engine, EngineFailedError, EngineGroup
from layerpush.apps.demo.interrupts import Interrupted, Interrupts
from layerpush.apps.demo.link import LinkError
from layerpush.apps.demo.load import RequestFailedError, complete_disaggregated, make_prompt
from layerpush.apps.demo.measure import examine, expected_tokens, take_turns
from layerpush.apps.demo.model import write_model
from layerpush.apps.demo.provenance import provenance
from layerpush.apps.demo.report import DemoReport
from layerpush.apps.demo.workspace import model_cache, places_of, work_directory
from layerpush.apps.tracing.picture import draw_pushes

SEED = 0
ANSWER_TOKENS = 24
WARM_UP_FACTOR = 1.2
FAILED, BROKEN = 1, 2


@dataclass(frozen=True)
class Size:
    """How much is measured: so many prompts of so many tokens."""

    prompts: int
    prompt_tokens: int

    @property
    def warm_up_tokens(self) -> int:
        """Longer than a measured prompt, so that it touches the pages that the others will use."""
        return int(WARM_UP_FACTOR * self.prompt_tokens)


@dataclass(frozen=True)
class Servers:
    """The running engines of a demo."""

    plain: Engine
    decode: Engine
    prefills: dict[str, Engine]
    faulty: Engine

    def all(self) -> list[Engine]:
        return [self.plain, self.decode, *self.prefills.values(), self.faulty]


def run_demo(
    json_file: Path | None,
    plot: Path,
    model_dir: Path | None,
    prompts: int,
    prompt_tokens: int,
    link: str | None,
    keep_logs: Path | None,
) -> int:
    """Run the demonstration and return the exit status of the command.

    0: tokens equal in every mode, every trace there, the negative control noticed. 1: one of these failed.
    2: it could not be carried out. 128 + signal: it was interrupted. Whatever happens, no server is left running.
    Main thread only: it installs signal handlers.
    """
    console = Console(soft_wrap=True)
    started_at = time.monotonic()
    size = Size(prompts, prompt_tokens)
    try:
        with Interrupts() as interrupts, work_directory(keep_logs) as work, places_of(link, interrupts) as places:
            model = write_model(model_dir or model_cache(), DEMO_SHAPE)
            cluster = Cluster(model, DEMO_SHAPE, size.warm_up_tokens, work / "trace", *places)
            report = _compare(Display(console), interrupts, cluster, size)
    except Interrupted as interrupted:
        console.print(f"[yellow]{interrupted}; all servers are down.[/]")
        return interrupted.exit_status
    except (EngineFailedError, RequestFailedError, LinkError, FileExistsError) as error:
        console.print("[red]The demo could not be carried out.[/]")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return BROKEN
    if json_file is not None:
        run = {"link": link, "seconds": round(time.monotonic() - started_at), "model": asdict(DEMO_SHAPE)}
        figures = report.as_json() | provenance(SEED) | run
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    status = _show(console, report, plot, json_file, time.monotonic() - started_at)
    if keep_logs is not None:
        console.print(f"Where the time went: layerpush trace summary {keep_logs}", markup=False, highlight=False)
    return status


def _compare(display: Display, interrupts: Interrupts, cluster: Cluster, size: Size) -> DemoReport:
    """Start everything, measure, and take everything down."""
    shape = cluster.shape
    display.console.print(
        f"Model: random Llama, {shape.layers} layers, {shape.kv_bytes_per_token >> 10} KiB of KV per token. "
        f"Prompts: {size.prompts} of {size.prompt_tokens} tokens, prefill in chunks of {TOKENS_PER_STEP}."
    )
    with EngineGroup(cluster.trace_root.parent, interrupts) as group:
        servers = Servers(
            plain=group.start(cluster.plain()),
            decode=group.start(cluster.decode()),
            prefills={mode: group.start(cluster.prefill(mode)) for mode in MODES},
            faulty=group.start(cluster.faulty_prefill()),
        )
        with display.starting(servers.all()) as on_ready:
            group.wait_ready(servers.all(), on_ready)
        try:
            return asyncio.run(_measure(display, group, servers, cluster, size))
        except RequestFailedError:
            group.check_alive()  # a dead server explains more than the request that it cut off
            raise


async def _measure(display: Display, group: EngineGroup, servers: Servers, cluster: Cluster, size: Size) -> DemoReport:
    vocabulary = cluster.shape.vocabulary
    measured = [make_prompt(size.prompt_tokens, SEED + index, vocabulary) for index in range(size.prompts)]
    warm_up = make_prompt(cluster.max_prompt_tokens, SEED, vocabulary)
    async with aiohttp.ClientSession() as session:
        with display.counting("Plain engine: the expected tokens", size.prompts) as on_done:
            expected = await expected_tokens(session, servers.plain, measured, ANSWER_TOKENS, on_done)
        group.stop([servers.plain])
        with display.counting("Warming up: handshakes, first touch of the KV cache", len(MODES)) as on_done:
            for prefill in servers.prefills.values():
                await complete_disaggregated(session, prefill, servers.decode, warm_up, ANSWER_TOKENS)
                on_done()
        with display.counting("Measuring", size.prompts * len(MODES)) as on_done:
            answers = await take_turns(session, servers.prefills, servers.decode, measured, ANSWER_TOKENS, on_done)
        with display.counting("Negative control: one layer is corrupted on its way", 1) as on_done:
            wrong = await complete_disaggregated(session, servers.faulty, servers.decode, measured[0], ANSWER_TOKENS)
            on_done()
    samples = {mode: examine(answers[mode], expected, cluster.trace_dir(mode), push_mode=mode) for mode in MODES}
    return DemoReport(samples, negative_control_detected=wrong.tokens != expected[0])


def _show(console: Console, report: DemoReport, plot: Path, json_file: Path | None, seconds: float) -> int:
    console.print(report.table())
    ratio = report.exposed_ratio()
    if ratio is not None:
        console.print(
            f"After prefill, layer mode leaves {100 * ratio:.1f} % of the time that request mode leaves exposed."
        )
    if report.negative_control_detected:
        console.print("Negative control: one corrupted layer changed the tokens, as it must.")
    pushes = report.typical_pushes("layer", "request")
    if pushes is not None:
        draw_pushes(pushes, plot)
        console.print(f"Timeline of one prompt: {plot}")
    if json_file is not None:
        console.print(f"Figures: {json_file}")
    console.print(f"{seconds:.0f} s in all.")
    problems = report.problems()
    for problem in problems:
        console.print(f"[red]FAILED[/] {problem}", highlight=False)
    return FAILED if problems else 0
