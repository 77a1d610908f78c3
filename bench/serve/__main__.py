"""The options of ``python -m bench.serve``."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from bench import OUTPUT
from bench.command import console, names, numbers
from bench.serve.command import run_command
from bench.serve.engine_options import DEFAULT_SHAPE, EngineOptions, ShapeName
from bench.serve.lineup import DEFAULT_STEP_TOKENS, MOONCAKE_PACKAGES
from bench.serve.plan import AGGREGATED, COMPARE, LOOPBACK, MODES, MOONCAKE, Compare, Pace, Setup, SweepPlan

LENGTHS, QUICK_LENGTHS = "1024,2048,4096", "1024"
ROUNDS, QUICK_ROUNDS = 5, 3
REQUESTS, QUICK_REQUESTS = 3, 2
LONGEST = "max"
ANSWER_TOKENS, SEED = 16, 0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    modes: Annotated[
        str,
        typer.Option(
            help="; ".join(f"{mode}: {what}" for mode, what in MODES.items())
            + f". aggregated is always measured. Default: all but {MOONCAKE}."
        ),
    ] = ",".join(mode for mode in MODES if mode != MOONCAKE),
    lengths: Annotated[
        str | None,
        typer.Option(
            help=f"Prompt lengths in tokens; max: the model's limit. Default: {LENGTHS}, or {QUICK_LENGTHS} if quick."
        ),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "1",
    background: Annotated[
        str,
        typer.Option(
            help="Other streams that D, or the aggregated engine, decodes meanwhile; 0,4 measures an idle D and a busy "
            "one."
        ),
    ] = "0",
    max_num_batched_tokens: Annotated[str, typer.Option(help="Tokens of an engine's step: the size of a chunk.")] = str(
        DEFAULT_STEP_TOKENS
    ),
    links: Annotated[
        str,
        typer.Option(
            help=f"Between P and D: {LOOPBACK}, or rates of an emulated link, for example 2gbit, which needs root."
        ),
    ] = LOOPBACK,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"Calls of vllm bench serve in each mode and cell. Default: {ROUNDS}, or {QUICK_ROUNDS} if quick.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Requests of a call, times the concurrency. Default: {REQUESTS}, or {QUICK_REQUESTS} if quick."
        ),
    ] = None,
    compare: Annotated[
        Compare,
        typer.Option(help="; ".join(f"{how}: compare answers {what}" for how, what in COMPARE.items()) + "."),
    ] = "aggregated",
    quick: Annotated[bool, typer.Option("--quick", help="One length, few rounds: some minutes on two cores.")] = False,
    corrupt: Annotated[
        bool,
        typer.Option("--corrupt", help="Damage one layer of layer mode's pushes: the run must fail with status 1."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Model, with its tokenizer. Default: one that the bench makes."),
    ] = None,
    shape: Annotated[
        ShapeName | None,
        typer.Option(
            help=f"Model that the bench makes. demo: that of make demo. long: for prompts of 4k to 64k tokens. "
            f"Default: {DEFAULT_SHAPE}."
        ),
    ] = None,
    engine_args: Annotated[
        str,
        typer.Option(metavar="TEXT", help="More options of vllm serve, for every engine."),
    ] = "",
    engine_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Environment of every engine; repeat it."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: serve-DATE.json in build/bench, or nothing with --quick."),
    ] = None,
    keep_logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep logs and traces in DIR.")] = None,
) -> None:
    """Measure every mode on real engines with `vllm bench serve`, side by side.

    All modes run at once, and the bench suspends the engines of all modes but one. In each round each mode gets the
    same prompts. Each round begins with another mode, so disturbances of the machine hit all modes. The bench compares
    all answers with the aggregated engine's, or as `--compare` says. If one differs, it writes nothing and the exit
    status is 1. The exit status is 2 if the run failed otherwise.

    The tables show time to first token (TTFT) and per further token (TPOT), throughput, the slowdown of prefill against
    the aggregated engine, the exposed time, which the transfer adds after prefill, and the hand-over: the time from
    the last layer on P to the first token here, with its parts. Use an otherwise idle machine: each engine takes a core
    while it computes, and about 1 GiB of memory.

    - python -m bench.serve --quick

    - python -m bench.serve --modes request,layer --lengths 1024,8192,max --out long.json

    - python -m bench.serve --shape long --modes pull,request,layer,auto --lengths 4096,32768 --links loopback,1gbit

    - python -m bench.serve --modes push,layer --links loopback,1gbit --max-num-batched-tokens 256,1024

    - python -m bench.serve --modes push,auto,token --lengths 512,4096 --background 0,4
    """
    if out is None and not quick:
        out = OUTPUT / f"serve-{time.strftime('%Y%m%d-%H%M%S')}.json"
    try:
        if shape and model:
            raise ValueError(f"--shape {shape}: --model names another model")
        if MOONCAKE in names(modes, list(MODES)) and not MOONCAKE_PACKAGES.exists():
            raise ValueError(f"--modes {MOONCAKE}: run scripts/mooncake first")
        options = EngineOptions(
            model,
            shape,
            tuple(shlex.split(engine_args)),
            dict(map(_pair, engine_env or [])),
            corrupt,
        )
        plan = SweepPlan(
            modes=[AGGREGATED, *(mode for mode in names(modes, list(MODES)) if mode != AGGREGATED)],
            lengths=_lengths(lengths or (QUICK_LENGTHS if quick else LENGTHS), options.longest_prompt(ANSWER_TOKENS)),
            loads=[Pace(each, streams) for streams in numbers(background, 0) for each in numbers(concurrency)],
            setups=[Setup(link.strip(), size) for link in links.split(",") for size in numbers(max_num_batched_tokens)],
            rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
            requests=requests or (QUICK_REQUESTS if quick else REQUESTS),
            answer_tokens=ANSWER_TOKENS,
            seed=SEED,
            compare=compare,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(run_command(console(), plan, options, out, keep_logs))


def _lengths(text: str, limit: int) -> list[int]:
    """Prompt lengths of up to ``limit`` tokens, each once. Raises ``ValueError``."""
    wanted = numbers(",".join(str(limit) if each.strip() == LONGEST else each for each in text.split(",")))
    if max(wanted) > limit:
        raise ValueError(f"--lengths {max(wanted)}: the model takes {limit} tokens and an answer; write {LONGEST}")
    return wanted


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--engine-env {text}: write NAME=VALUE")
    return name, value


if __name__ == "__main__":
    app()
