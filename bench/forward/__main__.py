"""``python -m bench.forward``: the cost of pushes for a forward, and the exposed time after it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from bench import OUTPUT, unfinished, write
from bench.command import console, names, numbers
from bench.forward import page
from bench.forward.cases import Growing, growing_cases, known_cases
from bench.forward.cells import VERIFY, CaseSamples, missed
from bench.forward.cores import of_this_machine, this_thread_on
from bench.forward.draws import PATTERNS
from bench.forward.growth import Line, lines
from bench.forward.links import HELP, links
from bench.forward.models import BLOCK_TOKENS, MODELS
from bench.forward.orders import Measure, WrongBytesError
from bench.forward.presets import DEFAULT, LONG, QUICK
from bench.forward.settings import ForwardSettings, Packing, Progress
from bench.forward.sweep import sweep
from bench.provenance import provenance
from bench.servers.link import LinkError

MODES = ("auto", "layer", "chunk", "request")
PACKAGES = ("layerpush", "nixl", "torch", "triton", "numpy")
"""Packages whose versions a result has."""
LAYER_MS = 5.0
LEAST_NOISE = 64 << 20

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    links_: Annotated[str, typer.Option("--links", help=HELP)] = "loopback",
    models: Annotated[
        str | None,
        typer.Option(
            help="; ".join(f"{name}: {model.about}" for name, model in MODELS.items())
            + f". Default: {','.join(DEFAULT.models)}, or {','.join(LONG.models)} with --long.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths. Default: 4096,16384,32768,131072; 1024,4096 with --quick; 65536, too, with --long."
        ),
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option(
            help="; ".join(f"{name}: {what}" for name, what in PATTERNS.items())
            + ". Default: contiguous,random; random with --quick or --long.",
        ),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            help="auto, layer, chunk: the granularity of this name. request: whole, after prefill. "
            f"{', '.join(VERIFY)}: auto, and D compares this share of the pushes. Default: {','.join(MODES)}."
        ),
    ] = ",".join(MODES),
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=BLOCK_TOKENS, help="Tokens of a step: --max-num-batched-tokens. Default: 2048, or 8192 with --long."
        ),
    ] = None,
    layer_ms: Annotated[
        float, typer.Option(min=0.5, help="Milliseconds of matrix products for a layer of a step.")
    ] = LAYER_MS,
    rounds: Annotated[
        int | None,
        typer.Option(min=2, help="Samples of each mode. Default: 6; 3 with --quick or --long."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short prompts, one pattern, few rounds: about a minute.")
    ] = False,
    long: Annotated[
        bool,
        typer.Option("--long", help="Prompts of 4k to 128k tokens, few rounds: half an hour, 14 GiB of memory."),
    ] = False,
    most_mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Skip prompts with more KV; each side takes 1.25 times as much. Default: 640; 160 with --quick; 5120 "
            "with --long.",
        ),
    ] = None,
    growth: Annotated[
        bool | None,
        typer.Option(help="Also measure the growth of costs, on the first link. Default: yes, but not with --long."),
    ] = None,
    packing: Annotated[Packing, typer.Option(help="The connector's setting.")] = "auto",
    progress: Annotated[
        Progress,
        typer.Option(help="NIXL's progress thread. calm: as with LAYERPUSH_CALM=1. spin: NIXL's own loop."),
    ] = "calm",
    pin: Annotated[
        bool,
        typer.Option(help="On a CPU: bind the forward to a core of its own, P's other threads and D to the others."),
    ] = True,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device of the memory of both processes.")] = "cpu",
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Damage one byte on D before the check: the run must fail with status 1.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="All samples as JSON. Default: a file in build/bench, or nothing with --quick."
        ),
    ] = None,
) -> None:
    """Measure the cost of pushes for a forward pass, and the exposed part of the transfer after it.

    Real NIXL connects two processes, P and D, each with a KV cache of a known model's geometry. There is no vLLM and no
    model. P's main thread computes layers of matrix products, writes KV into its blocks and calls the connector's
    hooks. Its writer thread pushes with the same session, WRITEs and packing as an engine's:

    - **layer**: each layer once it is computed;

    - **chunk**: all layers after each step;

    - **request**: the whole request after the last step, in one WRITE, as a stock connector does.

    In each round the bench measures every mode, the same forward without a push, and one WRITE of one descriptor, the
    limit of the wire. It poisons D's blocks before each sample and compares them byte for byte after it. If a byte is
    wrong, the bench writes nothing and the exit status is 1.

    Use an otherwise idle machine with two cores. The forward has one to itself. P's other threads, D and the kernel's
    TCP have the other one. With `--no-pin`, or with one core, all share all cores.

    - python -m bench.forward --quick

    - python -m bench.forward --long

    - python -m bench.forward --links shm,loopback --models llama-8b --tokens 4096 --rounds 20

    - sudo python -m bench.forward --links loopback,500mbit,1gbit,2gbit,5gbit,10gbit --models llama-70b-tp8 --no-growth
    """
    screen = console()
    if quick and long:
        raise typer.BadParameter("--quick or --long, not both")
    preset = QUICK if quick else LONG if long else DEFAULT
    try:
        wanted_links = links(links_, device)
        prompts = numbers(tokens) if tokens else list(preset.tokens)
        patterns = names(ids, list(PATTERNS)) if ids else list(preset.ids)
        chosen = names(models, list(MODELS)) if models else list(preset.models)
        wanted_modes = names(modes, (*MODES, *VERIFY))
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except LinkError as error:
        screen.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    most_mib, step = most_mib or preset.most_mib, chunk_tokens or preset.chunk_tokens
    cases, left_out = known_cases(chosen, prompts, patterns, step, most_mib << 20)
    grows = preset.growth if growth is None else growth
    growing = list(growing_cases(preset.points)) if grows else []
    if not cases:
        smallest = min(case.bytes for case in left_out) >> 20
        raise typer.BadParameter(f"every prompt has more KV than --most-mib {most_mib}; the smallest {smallest}")
    cores = of_this_machine() if pin and device == "cpu" else None
    if pin and device == "cpu" and cores is None:
        screen.print("The forward has no core of its own here: P and D share all cores.")
    every = [*cases, *(each.case for each in growing)]
    settings = ForwardSettings(
        cache_bytes=max(case.cache_bytes for case in every),
        device=device,
        progress=progress,
        corrupt=corrupt,
        layer_s=layer_ms * 1e-3,
        noise_bytes=max(LEAST_NOISE, *(case.layer_bytes for case in every)),
        packing=packing,
        cores=cores,
    )
    repeats = rounds or preset.rounds
    grown = [(wanted_links[0], each.case) for each in growing]  # on the first link, after its known cases
    known = [(link, case) for link in wanted_links for case in cases]
    places = [*known[: len(cases)], *grown, *known[len(cases) :]]
    orders = [(link, Measure(case, tuple(wanted_modes), repeats)) for link, case in places]
    started_at, conditions = time.monotonic(), provenance(settings.seed, PACKAGES)
    path = out or (None if preset.file is None else OUTPUT / preset.file)

    def parts(
        answers: Sequence[CaseSamples],
    ) -> tuple[list[CaseSamples], list[tuple[Growing, CaseSamples]], list[Line]]:
        """The known cases, the growing ones, and their lines once all cases are measured."""
        cells = [*answers[: len(cases)], *answers[len(cases) + len(grown) :]]
        of_lines = list(zip(growing, answers[len(cases) :], strict=False))
        points = [(each.what, each.value, cell) for each, cell in of_lines]
        return cells, of_lines, list(lines(points)) if len(answers) == len(orders) else []

    def body(answers: Sequence[CaseSamples], about: Mapping[str, object]) -> dict[str, Any]:
        cells, of_lines, fitted = parts(answers)
        return conditions | {
            "about": about,
            "settings": asdict(settings),
            "rounds": repeats,
            "seconds": round(time.monotonic() - started_at),
            "misses": missed(cells),
            "left_out": [asdict(case) | {"bytes": case.bytes, "memory_bytes": case.memory_bytes} for case in left_out],
            "cells": [cell.as_json() for cell in cells],
            "lines": [asdict(line) for line in fitted],
            "grown": [{"what": each.what, "value": each.value, **cell.as_json()} for each, cell in of_lines],
        }

    partial = None if path is None else unfinished(path)

    def keep(answers: Sequence[CaseSamples], about: Mapping[str, object]) -> None:
        if partial is not None:
            write(partial, body(answers, about))

    try:
        with this_thread_on(cores.others if cores else ()):  # P and D begin there, too
            answers, about = sweep(screen, orders, settings, keep)
    except WrongBytesError as error:
        if partial is not None:
            partial.unlink(missing_ok=True)
        screen.print(f"{error}: nothing is written", style="red", markup=False)
        raise typer.Exit(1) from error
    result = body(answers, about)
    screen.print(page.table(result), markup=False)
    screen.print(*(result["misses"] or ["every figure is within its limits"]), sep="\n", markup=False)
    if path is not None and partial is not None:
        write(path, result)
        partial.unlink(missing_ok=True)
        screen.print(f"Written: {path}; {len(left_out)} prompts above {most_mib} MiB left out")


if __name__ == "__main__":
    app()
