"""``python -m bench.push``: every plan over two links, and whether auto finds the best one."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import OUTPUT, write
from bench.pair.lists import names, numbers
from bench.pair.settings import Settings
from bench.pair.sweep import (
    PACKAGES,
    PROGRESS_THREADS,
    AgentThreads,
    Corrupt,
    ProgressThread,
    Seed,
    StagingMib,
    need_cuda,
    sweep,
)
from bench.pair.tables import PATTERNS
from bench.pair.wires import CUDA_IPC, SHM, TCP, Wire
from bench.push.cells import Cell, summary
from bench.push.orders import Measure
from bench.push.page import tables
from bench.push.plot import plot
from bench.push.points import COUNTS, QUICK_COUNTS, QUICK_SIZES, SIZES, points
from bench.push.report import line, misses, model
from layerpush.apps.demo.interrupts import Interrupts
from layerpush.apps.demo.provenance import provenance

LINKS: dict[str, dict[str, Wire]] = {"cpu": {"shm": SHM, "tcp": TCP}, "cuda": {"cuda_ipc": CUDA_IPC}}
"""What there is between two processes, by the device that has their memory."""
ROUNDS, QUICK_ROUNDS = 15, 5
MOST_MIB, QUICK_MOST_MIB = 64, 16
PIPE_WIDTH = 180

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    links: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="shm: shared memory and CMA. tcp: TCP over loopback. cuda_ipc: between two processes on one GPU, with "
            "--device cuda. Default: all that the device has.",
        ),
    ] = None,
    block_kib: Annotated[
        str | None, typer.Option(show_default=False, help="KiB of a block in one layer. Default: 2,4,8,16,32,64,256.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(show_default=False, help="Blocks of a WRITE. Default: 16,64,256,1024,4096.")
    ] = None,
    ids: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {what}" for name, what in PATTERNS.items()) + ".")
    ] = ",".join(PATTERNS),
    layers: Annotated[int, typer.Option(min=1, help="Layers that a WRITE has these blocks in.")] = 1,
    rounds: Annotated[
        int | None, typer.Option(min=2, show_default=False, help="Samples of each plan at a point. Default: 15.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, counts and rounds: about a minute.")] = False,
    most_mib: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Leave out WRITEs of more. Default: 64, or 16 if quick."),
    ] = None,
    staging_mib: StagingMib = 64,
    polls: Annotated[
        str, typer.Option(help="engine: both sides look as often as a worker's writer thread. spin: without a pause.")
    ] = "engine",
    progress: ProgressThread = "calm",
    threads: AgentThreads = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda: where caches and rings are.")] = "cpu",
    seed: Seed = 0,
    corrupt: Corrupt = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="All times as JSON; the picture goes beside it, as PNG. Default: build/bench/push.json, or nothing "
            "with --quick.",
        ),
    ] = None,
) -> None:
    """Measure what packing is worth, and whether `packing: "auto"` knows it.

    Two processes, P and D, each with a KV cache and a staging ring, are connected by real NIXL; there is no vLLM and no
    model. At each point, so many blocks of so many KiB that lie so scattered, one WRITE goes by each plan in turn:

    - **direct**, from cache to cache;

    - **gathered**, put together on P first;

    - **packed**, put together on P and taken apart on D;

    - **auto**, whichever of them the cost model chooses, as it does in an engine.

    A sample is the time from the decision until P knows that every byte is in D's cache. Before each one D's blocks and
    both rings are poisoned; after each one D's bytes are compared with P's, and at the end of a point all others with
    the poison. If a byte is wrong, nothing is written and the exit status is 1.

    The tables show which plan is the best where, what it takes of direct's time, and the points at which auto takes
    over 10 % more than the best plan or than direct, with the model's estimates. What staging memory has no room for
    counts as impossible. Use an otherwise idle machine.

    - python -m bench.push --quick

    - python -m bench.push --links shm --block-kib 8,16 --blocks 1024 --ids random --rounds 40

    - python -m bench.push --out push.json

    - python -m bench.push --device cuda --progress spin --out push-gpu.json
    """
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    try:
        (device,) = names(device, list(LINKS))
        wanted_links = names(links or ",".join(LINKS[device]), list(LINKS[device]))
        sizes = [kib << 10 for kib in numbers(block_kib)] if block_kib else list(QUICK_SIZES if quick else SIZES)
        counts = numbers(blocks) if blocks else list(QUICK_COUNTS if quick else COUNTS)
        patterns = names(ids, list(PATTERNS))
        (polls,), (progress,) = names(polls, ["engine", "spin"]), names(progress, PROGRESS_THREADS)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    need_cuda(device)
    most_mib = most_mib or (QUICK_MOST_MIB if quick else MOST_MIB)
    most = most_mib << 20
    wanted, left_out = points(sizes, counts, patterns, layers, most)
    if not wanted:
        raise typer.BadParameter(f"every point moves more than --most-mib {most_mib}")
    settings = Settings(
        seed=seed,
        cache_bytes=2 * max(point.bytes for point in wanted),
        staging_bytes=staging_mib << 20,
        device=device,
        agent_threads=threads,
        progress=progress,  # type: ignore[arg-type]
        polls=polls,  # type: ignore[arg-type]
        corrupt=corrupt,
    )
    repeats = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    orders = [(link, point, Measure(point, repeats)) for link in wanted_links for point in wanted]
    started_at = time.monotonic()
    answers, about = sweep(console, "bench.push", _wire_of, orders, settings, line)
    cells: list[Cell] = answers
    head = provenance(seed, PACKAGES) | {"about": about, "settings": asdict(settings), "rounds": repeats}
    result = head | {
        "seconds": round(time.monotonic() - started_at),
        "summary": summary(cells),
        "left_out": [asdict(point) for point in left_out],
        "cells": [cell.as_json() for cell in cells],
    }
    console.print(tables(result, PATTERNS), markup=False)
    console.print(model(cells))
    missed = misses(cells)
    if missed is not None:
        console.print(missed)
    path = out or (None if quick else OUTPUT / "push.json")
    if path is not None:
        write(path, result)
        plot(cells, path.with_suffix(".png"), _title(settings))
        console.print(
            f"Written: {path}, {path.with_suffix('.png')}; {len(left_out)} points above {most_mib} MiB left out"
        )


def _title(settings: Settings) -> str:
    return f"A WRITE between two processes on one {'GPU' if settings.device == 'cuda' else 'machine'}, by plan"


@contextlib.contextmanager
def _wire_of(link: str, _: Interrupts) -> Iterator[Wire]:
    yield next(wires[link] for wires in LINKS.values() if link in wires)


if __name__ == "__main__":
    app()
