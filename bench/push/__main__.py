"""``python -m bench.push``: times of every plan over two links, and auto's choices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.pair import command
from bench.pair.lists import names, numbers
from bench.pair.settings import Settings
from bench.pair.sweep import sweep
from bench.pair.tables import PATTERNS
from bench.pair.unfinished import Unfinished
from bench.pair.wires import CUDA_IPC, SHM, TCP, Wire
from bench.push.cells import Cell, summary
from bench.push.orders import Measure
from bench.push.page import tables
from bench.push.plot import plot
from bench.push.points import COUNTS, QUICK_COUNTS, QUICK_SIZES, SIZES, points
from bench.push.report import line, misses, model
from bench.servers.interrupts import Interrupts

LINKS: dict[str, dict[str, Wire]] = {"cpu": {"shm": SHM, "tcp": TCP}, "cuda": {"cuda_ipc": CUDA_IPC}}
"""The links between two processes, by the device of their memory."""
ROUNDS, QUICK_ROUNDS = 15, 5
MOST_MIB, QUICK_MOST_MIB = 64, 16

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
    ids: Annotated[str, typer.Option(help=command.PATTERNS_HELP)] = ",".join(PATTERNS),
    layers: Annotated[int, typer.Option(min=1, help="Layers of a WRITE; each has these blocks.")] = 1,
    rounds: Annotated[
        int | None, typer.Option(min=2, show_default=False, help="Samples of each plan at a point. Default: 15.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, counts and rounds: about a minute.")] = False,
    most_mib: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Skip WRITEs above this size. Default: 64, or 16 if quick."),
    ] = None,
    staging_mib: command.StagingMib = 64,
    polls: Annotated[
        str, typer.Option(help="engine: both sides poll as often as a worker's writer thread. spin: without a pause.")
    ] = "engine",
    progress: command.ProgressThread = "calm",
    threads: command.AgentThreads = 4,
    device: command.Device = "cpu",
    seed: command.Seed = 0,
    corrupt: command.Corrupt = False,
    out: command.Out = None,
) -> None:
    """Measure the gain of packing, and whether `packing: "auto"` chooses the best plan.

    Real NIXL connects two processes, P and D, each with a KV cache and a staging ring. There is no vLLM and no model. A
    point is a block size, a number of blocks and a pattern of ids. At each point each plan moves one WRITE in turn:

    - **direct**, from cache to cache;

    - **gathered**, collected on P first;

    - **packed**, collected on P and unpacked on D;

    - **auto**, the choice of the cost model, as in an engine.

    A sample is the time from the decision until P knows that every byte is in D's cache. Before each sample the bench
    poisons D's blocks and both rings. After it, it compares D's bytes with P's, and after a point all others with the
    poison. If a byte is wrong, the bench writes nothing and the exit status is 1.

    The tables show the best plan at each point, its share of direct's time, and the points at which auto takes over
    10 % more than the best plan or than direct, with the model's estimates. A plan is impossible at points that do not
    fit into staging memory. Use an otherwise idle machine.

    - python -m bench.push --quick

    - python -m bench.push --links shm --block-kib 8,16 --blocks 1024 --ids random --rounds 40

    - python -m bench.push --out push.json

    - python -m bench.push --device cuda --progress spin --out push-gpu.json
    """
    console = command.console()
    with command.checked(console):
        device = command.one_of(device, tuple(LINKS))
        wanted_links = names(links or ",".join(LINKS[device]), list(LINKS[device]))
        sizes = [kib << 10 for kib in numbers(block_kib)] if block_kib else list(QUICK_SIZES if quick else SIZES)
        counts = numbers(blocks) if blocks else list(QUICK_COUNTS if quick else COUNTS)
        patterns = names(ids, list(PATTERNS))
        polls = command.one_of(polls, ("engine", "spin"))
        progress = command.one_of(progress, command.PROGRESS_THREADS)
        command.need_cuda(device)
    most_mib = most_mib or (QUICK_MOST_MIB if quick else MOST_MIB)
    wanted, left_out = points(sizes, counts, patterns, layers, most_mib << 20)
    if not wanted:
        raise typer.BadParameter(f"every point moves more than --most-mib {most_mib}")
    settings = Settings(
        seed=seed,
        cache_bytes=2 * max(point.bytes for point in wanted),
        staging_bytes=staging_mib << 20,
        device=device,
        agent_threads=threads,
        progress=progress,
        polls=polls,
        corrupt=corrupt,
    )
    repeats = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    orders = [(link, point, Measure(point, repeats)) for link in wanted_links for point in wanted]
    started_at = time.monotonic()
    path = command.path_of(out, None if quick else "push.json")

    def body(cells: Sequence[Cell], about: Mapping[str, object]) -> dict[str, Any]:
        return command.header(settings, repeats, about, started_at) | {
            "summary": summary(list(cells)),
            "left_out": [asdict(point) for point in left_out],
            "cells": [cell.as_json() for cell in cells],
        }

    unfinished = Unfinished(path, body)
    cells, about = sweep(console, "bench.push", _wire_of, orders, settings, line, unfinished)
    result = body(cells, about)
    console.print(tables(result, PATTERNS), markup=False)
    console.print(model(cells))
    missed = misses(cells)
    if missed is not None:
        console.print(missed)
    if path is not None:
        title = f"A WRITE between two processes on one {'GPU' if device == 'cuda' else 'machine'}, by plan"
        left = f"{len(left_out)} points above {most_mib} MiB"

        def draw(picture: Path) -> list[Path]:
            plot(cells, picture, title)
            return [picture]

        command.publish(console, path, result, draw, left)
        unfinished.remove()


@contextlib.contextmanager
def _wire_of(link: str, _: Interrupts) -> Iterator[Wire]:
    yield next(wires[link] for wires in LINKS.values() if link in wires)


if __name__ == "__main__":
    app()
