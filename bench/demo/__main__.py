"""``make demo``: one P and one D, four ways to push, one table."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console

from bench.demo.cluster import DEMO_SHAPE, MODES, TOKENS_PER_STEP, Cluster
from bench.demo.measure import examine, expected_tokens, take_turns
from bench.demo.report import DemoReport
from bench.demo.timeline import draw_pushes
from bench.provenance import provenance
from bench.servers.display import Display
from bench.servers.engines import EngineFailedError, EngineGroup, EngineServer, ServerPlace
from bench.servers.interrupts import Interrupted, Interrupts
from bench.servers.link import LinkError
from bench.servers.load import RequestFailedError, complete_disaggregated, make_prompt
from bench.servers.model import write_model
from bench.servers.workspace import model_cache, places_of, work_directory

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

SEED = 0
ANSWER_TOKENS = 16
STOP_S = 5.0
"""Short, because a vLLM server may hang if it is stopped while it starts."""
FAILED, BROKEN = 1, 2


@app.command()
def main(
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write all figures to FILE as JSON."),
    ] = None,
    plot: Annotated[
        Path, typer.Option(metavar="FILE", dir_okay=False, help="File for the timeline picture (PNG).")
    ] = Path("layerpush-demo.png"),
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts for each mode.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Length of each prompt, in tokens.")] = 2048,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Emulate a link of this speed between the engines, for example 1gbit; needs root. Default: loopback.",
        ),
    ] = None,
    keep_logs: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Keep the engines' logs and traces in DIR.")
    ] = None,
) -> None:
    """Push KV layer by layer from a real vLLM prefill engine to a real decode engine, over real NIXL, on the CPU.

    The demo pushes the same prompts four ways (auto, by layer, by chunk, whole request). For each way it prints the
    exposed time, which the transfer adds after prefill. It compares all tokens with those of one plain engine.

    Example:  make demo ARGS="--prompts 2 --json demo.json --keep-logs logs"

    Exit status: 0 if every token is right, 1 if a token is wrong, 2 if the demo could not run. Ctrl-C stops the
    engines and leaves nothing behind.
    """
    console = Console(soft_wrap=True)
    started_at, conditions = time.monotonic(), provenance(SEED)
    lengths = [prompt_tokens] * prompts
    try:
        with Interrupts() as interrupts, work_directory(keep_logs) as work, places_of(link, interrupts) as places:
            report = _compare(Display(console), interrupts, work, places, lengths)
    except Interrupted as interrupted:
        console.print(f"[yellow]{interrupted}; all servers are down.[/]")
        raise typer.Exit(interrupted.exit_status) from None
    except (EngineFailedError, RequestFailedError, LinkError, FileExistsError) as error:
        console.print("[red]The demo could not be carried out.[/]")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(BROKEN) from None
    if json_file is not None:
        run = {"link": link, "seconds": round(time.monotonic() - started_at), "model": asdict(DEMO_SHAPE)}
        figures = report.as_json() | conditions | run
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    status = _show(console, report, plot, json_file)
    if keep_logs is not None:
        console.print(f"Where the time went: layerpush trace summary {keep_logs}", markup=False, highlight=False)
    console.print(f"{time.monotonic() - started_at:.0f} s in all.")
    raise typer.Exit(status)


def _compare(
    display: Display,
    interrupts: Interrupts,
    work: Path,
    places: Sequence[ServerPlace],
    lengths: list[int],
) -> DemoReport:
    """Start the servers, measure prompts of these lengths in each mode, and stop the servers."""
    display.console.print(
        f"Model: random Llama, {DEMO_SHAPE.layers} layers, {DEMO_SHAPE.kv_bytes_per_token >> 10} KiB of KV per token. "
        f"Prompts: {len(lengths)} of {max(lengths)} tokens, prefill in chunks of {TOKENS_PER_STEP}."
    )
    with EngineGroup(work, interrupts, stop_timeout_s=STOP_S, forks=True) as group:
        for place in places:
            group.preload(place)
        model = write_model(model_cache(), DEMO_SHAPE)
        cluster = Cluster(model, DEMO_SHAPE, max(lengths), work / "trace", *places)
        with display.waiting("Importing vLLM, once for all servers"):
            specs = cluster.prefill(), cluster.decode(), cluster.faulty_prefill()
            p, d, faulty = servers = [group.start(spec) for spec in specs]
        with display.starting(servers) as on_ready:
            group.wait_ready(servers, on_ready)
        prompts = [make_prompt(tokens, SEED + index, DEMO_SHAPE.vocabulary) for index, tokens in enumerate(lengths)]
        try:
            return asyncio.run(_measure(display, p, d, faulty, cluster.trace_root, prompts))
        except RequestFailedError:
            group.check_alive()  # the server's end explains the failed request
            raise


async def _measure(
    display: Display, p: EngineServer, d: EngineServer, faulty: EngineServer, traces: Path, prompts: list[list[int]]
) -> DemoReport:
    """``faulty``: a P that writes wrong bytes. ``traces`` has the ``trace_dir`` of P and of D."""
    modes = list(MODES)
    async with aiohttp.ClientSession() as session:
        with display.counting("P and D, each without a transfer: the expected tokens", max(2, len(prompts))) as on_done:
            expected = await expected_tokens(session, (p, d), prompts, ANSWER_TOKENS, on_done)
        short = prompts[0][:TOKENS_PER_STEP]
        right = await complete_disaggregated(session, p, d, short, ANSWER_TOKENS)  # after the handshake
        with display.counting(f"P pushes to D, in turn by {', '.join(modes)}", len(prompts) * len(modes)) as on_done:
            answers = await take_turns(session, p, d, modes, prompts, ANSWER_TOKENS, on_done)
        with display.counting("Negative control: one layer is corrupted on its way, and then again with verify", 2):
            # whole pushes are not verified
            wrong = await complete_disaggregated(session, faulty, d, prompts[0], ANSWER_TOKENS, "request")
            # of a longer prompt P verifies a part, by chance
            verified = await complete_disaggregated(session, faulty, d, short, ANSWER_TOKENS, "layer")
    samples = {mode: examine(answers[mode], expected, traces, mode) for mode in modes}
    return DemoReport(samples, wrong.tokens != expected[0], verified.tokens == right.tokens)


def _show(console: Console, report: DemoReport, plot: Path, json_file: Path | None) -> int:
    console.print(report.table())
    sooner = report.sooner_ms()
    if sooner is not None:
        console.print(
            f"From the last layer to the first token, auto mode takes {sooner:.0f} ms less than a whole push."
        )
    if report.negative_control_detected:
        console.print("Negative control: one corrupted layer changed the tokens, as it must.")
    if report.verify_detected:
        console.print("With verify 1.0, D noticed it and computed the prompt itself: the tokens are right.")
    pushes = report.typical_pushes(*MODES)
    if pushes is not None:
        draw_pushes(pushes, plot)
        console.print(f"Timeline of one prompt: {plot}")
    if json_file is not None:
        console.print(f"Figures: {json_file}")
    problems = report.problems()
    for problem in problems:
        console.print(f"[red]FAILED[/] {problem}", highlight=False)
    return FAILED if problems else 0


if __name__ == "__main__":
    app()
