"""``python -m bench.push``: every plan over two links, and whether auto finds the best one."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bench import OUTPUT
from bench.pair.lists import names, numbers
from bench.pair.orders import WrongBytesError
from bench.pair.processes import Pair, PairError
from bench.pair.settings import Settings
from bench.pair.tables import PATTERNS
from bench.pair.wires import CUDA_IPC, SHM, TCP, Wire
from bench.push.cells import Cell, summary
from bench.push.orders import Measure
from bench.push.plot import plot
from bench.push.points import COUNTS, QUICK_COUNTS, QUICK_SIZES, SIZES, Point, points, time_left
from bench.push.report import line, maps, misses, model
from layerpush.demo.interrupts import Interrupted, Interrupts
from layerpush.demo.provenance import provenance

LINKS: dict[str, dict[str, Wire]] = {"cpu": {"shm": SHM, "tcp": TCP}, "cuda": {"cuda_ipc": CUDA_IPC}}
"""What there is between two processes, by the device that has their memory."""
PACKAGES = ("layerpush", "nixl", "torch", "triton", "numpy")
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
    staging_mib: Annotated[int, typer.Option(min=2, help="Staging memory of each side: staging_bytes.")] = 64,
    polls: Annotated[
        str, typer.Option(help="engine: both sides look as often as a worker's writer thread. spin: without a pause.")
    ] = "engine",
    progress: Annotated[
        str, typer.Option(help="NIXL's progress thread. calm: as with LAYERPUSH_CALM=1. spin: as NIXL has it. off.")
    ] = "calm",
    threads: Annotated[int, typer.Option(min=0, help="Threads of a NIXL agent; vLLM has 4.")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda: where caches and rings are.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of block ids and bytes.")] = 0,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Damage one byte on D before it is checked: the run has to fail.")
    ] = False,
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
        (polls,), (progress,) = names(polls, ["engine", "spin"]), names(progress, ["calm", "spin", "off"])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if device == "cuda":
        _need_cuda()
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
    started_at = time.monotonic()
    try:
        with Interrupts():
            cells, about = measure(console, wanted_links, wanted, repeats, settings)
    except Interrupted as interrupted:
        console.print(f"[yellow]{interrupted}; both processes are down, nothing is written.[/]")
        raise typer.Exit(interrupted.exit_status) from None
    except WrongBytesError as error:
        console.print(f"{error}: nothing is written", style="red", markup=False)
        raise typer.Exit(1) from error
    except PairError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    console.print(*maps(cells), model(cells), sep="\n")
    missed = misses(cells)
    if missed is not None:
        console.print(missed)
    console.print(summary(cells))
    path = out or (None if quick else OUTPUT / "push.json")
    if path is not None:
        head = provenance(seed, PACKAGES) | {"about": about, "settings": asdict(settings), "rounds": repeats}
        body = {
            "seconds": round(time.monotonic() - started_at),
            "summary": summary(cells),
            "left_out": [asdict(point) for point in left_out],
            "cells": [cell.as_json() for cell in cells],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head | body, indent=1) + "\n")
        plot(cells, path.with_suffix(".png"), _title(settings))
        console.print(
            f"Written: {path}, {path.with_suffix('.png')}; {len(left_out)} points above {most_mib} MiB left out"
        )


def _need_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU")


def _title(settings: Settings) -> str:
    return f"A WRITE between two processes on one {'GPU' if settings.device == 'cuda' else 'machine'}, by plan"


def measure(
    console: Console, links: Sequence[str], wanted: Sequence[Point], rounds: int, settings: Settings
) -> tuple[list[Cell], dict[str, Any]]:
    """Every point over every link, and what the processes say of themselves."""
    cells: list[Cell] = []
    about: dict[str, Any] = {}
    waiting = [point for _ in links for point in wanted]
    done: list[Point] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with tempfile.TemporaryDirectory(prefix="layerpush-push-") as logs, bar:
        task = bar.add_task("points", total=len(waiting), left="")
        spent = 0.0
        for link in links:
            with Pair("bench.push", LINKS[settings.device][link], settings, Path(logs)) as pair:
                about[link] = pair.about
                for point in wanted:
                    began = time.monotonic()
                    cells.append(pair.ask(Measure(point, rounds)))
                    spent += time.monotonic() - began
                    done.append(waiting.pop(0))
                    left = f"about {time_left(waiting, done, spent) / 60:.1f} min left"
                    bar.update(task, advance=1, left=left)
                    console.print(line(cells[-1]), "" if console.is_terminal else f"  {left}")
    return cells, about


if __name__ == "__main__":
    app()
