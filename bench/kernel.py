"""Rates of gathering blocks, beside a plain copy of as many bytes and another operator."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from bench import OUTPUT, unfinished, write
from bench.bootstrap import Interval, ratio_of_medians
from bench.command import numbers
from bench.kernelpage import OURS, TORCHS
from bench.kernelreference import gather_reference
from bench.provenance import provenance
from layerpush_kernels import FULL_DEVICE_PROGRAMS, gather_blocks

COPY = "copy"
POOL_FACTOR = 2  # a cache has twice the blocks that are moved
POISON = 0xFF
# More than caches hold. While a GPU writes them, the CPU prepares the timed launch.
FLUSH_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
MOST_BYTES = {"cuda": 2048 << 20, "cpu": 128 << 20}
IDS = ("contiguous", "random")
SEED = 0
Way = Callable[[], object]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


class WrongGatherError(Exception):
    """A way moved other bytes than the reference; its time means nothing."""


@dataclass(frozen=True)
class CopyCase:
    """``blocks`` blocks of ``block_bytes`` bytes whose ids follow a pattern."""

    block_bytes: int
    blocks: int
    ids: str

    @property
    def bytes(self) -> int:
        return self.block_bytes * self.blocks

    def block_ids(self) -> torch.Tensor:
        """int64 ``[blocks]`` on the CPU: one run, or any order."""
        if self.ids == "contiguous":
            return torch.arange(self.blocks)
        return torch.randperm(POOL_FACTOR * self.blocks, generator=torch.Generator().manual_seed(SEED))[: self.blocks]


@dataclass(frozen=True)
class CopyTimes:
    """Seconds of every way in every round, for one case. In a round the ways take turns."""

    case: CopyCase
    seconds: Mapping[str, Sequence[float]]

    def gb_s(self, way: str) -> dict[str, float]:
        """Payload in units of 1e9 bytes per second, each byte counted once; a slow round has a low rate."""
        rates = self.case.bytes / np.asarray(self.seconds[way]) / 1e9
        return {f"p{share}": float(np.percentile(rates, share)) for share in (20, 50, 80)}

    def of_copy(self, way: str) -> Interval:
        """The median rate as a share of the copy's."""
        return ratio_of_medians(self.seconds[COPY], self.seconds[way])

    def as_json(self) -> dict[str, Any]:
        ways = {
            way: {"gb_s": self.gb_s(way), "of_copy": self.of_copy(way).as_json("ratio"), "seconds": list(seconds)}
            for way, seconds in self.seconds.items()
        }
        return asdict(self.case) | {"ways": ways}


class Timer:
    """Seconds of a call with cold caches: by events on a GPU, by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flushed = torch.empty(FLUSH_BYTES[device.type], dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, way: Way) -> float:
        self.flushed.zero_()
        if self.device.type == "cpu":
            started_at = time.perf_counter()
            way()
            return time.perf_counter() - started_at
        self.start.record()
        way()
        self.end.record()
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1e3


@dataclass(frozen=True)
class KernelBench:
    """Measures all cells on a device."""

    device: torch.device
    rounds: int

    def measure(self, case: CopyCase, timer: Timer) -> CopyTimes:
        """Gather the blocks of one case. Raises ``WrongBytesError``, before any time is taken, if a byte is wrong."""
        shape = (POOL_FACTOR * case.blocks, case.block_bytes // 2)
        noise = torch.Generator(self.device).manual_seed(SEED)
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=self.device, generator=noise)
        cache = bits.view(torch.bfloat16)
        host_ids = case.block_ids()
        ids = host_ids.to(self.device)
        packed = torch.empty((case.blocks, shape[1]), dtype=torch.bfloat16, device=self.device)
        expected = gather_reference([cache], host_ids)[0].view(torch.bfloat16)
        piece = expected.clone()
        ways: dict[str, Way] = {
            COPY: lambda: packed.copy_(piece),
            OURS: lambda: gather_blocks(cache, ids, packed),
            TORCHS: lambda: torch.index_select(cache, 0, ids, out=packed),
        }
        for name, way in ways.items():
            packed.view(torch.uint8).fill_(POISON)
            way()
            if not torch.equal(packed.view(torch.uint8), expected.view(torch.uint8)):
                raise WrongGatherError(f"{name}: wrong bytes after the gather of {case}")
        return CopyTimes(case, self._rounds(ways, timer))

    def _rounds(self, ways: Mapping[str, Way], timer: Timer) -> dict[str, list[float]]:
        """Each round begins with another way. A first round warms up and does not count."""
        names = list(ways)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.rounds + 1):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                took = timer.seconds(ways[name])
                if turn:
                    seconds[name].append(took)
        return seconds


@app.command()
def main(
    block_bytes: Annotated[str, typer.Option(help="Bytes of a block in one layer.")] = "4096,8192,16384,65536,262144",
    blocks: Annotated[str, typer.Option(help="Numbers of blocks.")] = "64,512,1024,8192",
    rounds: Annotated[int, typer.Option(min=2, help="Samples of each way; the ways take turns.")] = 30,
    device: Annotated[str, typer.Option(help="cuda or cpu; auto takes a GPU if there is one.")] = "auto",
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="All times as JSON. Default: build/bench/kernel.json.",
        ),
    ] = OUTPUT / "kernel.json",
) -> None:
    """Measure gather_blocks.

    A case is a number of blocks and a block size, with ids in one run or in any order. These move it in turn: a plain
    copy of as many contiguous bytes, which is the ceiling; layerpush; torch's index_select. Each must first move every
    byte right. If one does not, the bench writes nothing and the exit status is 1. A run that is
    killed leaves the cases so far in `kernel.unfinished.json`, beside the result. The bench leaves out cases that move
    more than 2 GiB on a GPU, or 128 MiB on a CPU.

    GB/s are payload: a gather of 1 GB reads 1 GB and writes 1 GB. The bench flushes caches before each sample. On a CPU
    torch's operators do the copies, in one thread; their rate does not apply to a GPU.

    - python -m bench.kernel --block-bytes 4096,65536 --blocks 64,1024 --rounds 10

    - python -m bench.kernel --device cuda --out kernel-h200.json
    """
    console = Console(soft_wrap=True, highlight=False)
    torch.set_num_threads(1)
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    every = [CopyCase(*each) for each in itertools.product(numbers(block_bytes), numbers(blocks), IDS)]
    left_out = [asdict(case) for case in every if case.bytes > MOST_BYTES[kind]]
    bench, timer, cells = KernelBench(place, rounds), Timer(place), list[CopyTimes]()
    hardware = {"kind": kind, "name": torch.cuda.get_device_name(place) if kind == "cuda" else None}
    settings = {"device": hardware, "rounds": rounds, "max_programs": FULL_DEVICE_PROGRAMS, "left_out": left_out}
    head = provenance(SEED) | settings
    partial = unfinished(out)

    def body() -> dict[str, object]:
        return {**head, "cells": [cell.as_json() for cell in cells]}

    try:
        for case in every:
            if case.bytes <= MOST_BYTES[kind]:
                cells.append(bench.measure(case, timer))
                console.print(_line(cells[-1]))
                write(partial, body())
    except WrongGatherError as error:
        partial.unlink(missing_ok=True)
        console.print(f"{error}: nothing is written", style="red", markup=False)
        raise typer.Exit(1) from error
    write(out, body())
    partial.unlink(missing_ok=True)
    console.print(f"Written: {out}; {len(left_out)} cases above {MOST_BYTES[kind] >> 20} MiB left out")


def _line(cell: CopyTimes) -> str:
    case = cell.case
    rates = "  ".join(f"{way} {cell.gb_s(way)['p50']:.2f} ({cell.of_copy(way).value:.0%})" for way in cell.seconds)
    return f"{case.block_bytes / 1024:6g} KiB x {case.blocks:<5}{case.ids:11}GB/s (of copy): {rates}"


if __name__ == "__main__":
    app()
