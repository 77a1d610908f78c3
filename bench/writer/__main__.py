"""``python -m bench.writer``: processor time of the writer thread, by WRITE, descriptor, layer and request."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import numpy as np
import typer

from bench import write
from bench.forward.links import HELP, links, wire_of
from bench.pair import command
from bench.pair.settings import Settings
from bench.pair.sweep import sweep
from bench.writer.page import table
from bench.writer.prices import LOCKED, UNLOCKED, Measure, Samples, line, step_of

ROUNDS, QUICK_ROUNDS = 100, 5

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    link: Annotated[str, typer.Option(help=HELP)] = "loopback",
    rounds: Annotated[
        int | None, typer.Option(min=2, show_default=False, help="Samples of each case. Default: 100, or 5 if quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds: half a minute.")] = False,
    seed: command.Seed = 0,
    corrupt: command.Corrupt = False,
    out: command.Out = None,
) -> None:
    """Measure where the processor time of P's writer thread goes in a push.

    All times are of that thread's processor clock. There is no vLLM and no model.

    - **Python**: the writer's turns in one step of 2,048 tokens and 80 layers, a rank of Llama-70B. The step has 1, 4
      or 16 prompts, pushed by layer or by chunk, over a transport that costs nothing.

    - **NIXL**: the calls for one WRITE of 1 to 1,000 descriptors of 8 KiB to a second process, by whether they hold
      Python's lock. A straight line through them has the price of a WRITE and of a descriptor.

    The last columns of the table are the share that one WRITE for all requests of a step would save.

    Each round takes every sample once, in another order. After each WRITE the bench compares D's bytes with P's, and at
    the end all others with the poison. If a byte is wrong, the bench writes nothing and the exit status is 1. Use an
    otherwise idle machine.

    - python -m bench.writer --quick

    - python -m bench.writer --link shm --rounds 300 --out writer.json
    """
    console = command.console()
    with command.checked(console):
        (link,) = links(link, "cpu")
    settings = Settings(seed=seed, cache_bytes=step_of(1).cache_bytes, corrupt=corrupt)
    repeats = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    measures = [Measure("turns", repeats, weight=5), Measure("calls", repeats, weight=1)]
    started_at = time.monotonic()
    parts, about = sweep(
        console, "bench.writer", wire_of, [(link, each, each) for each in measures], settings, _medians
    )
    turns, calls = ([asdict(samples) for samples in part] for part in parts)
    result = command.header(settings, repeats, about, started_at) | {
        "lines": {"locked": line(calls, LOCKED), "unlocked": line(calls, UNLOCKED)},
        "turns": turns,
        "calls": calls,
    }
    console.print(table(result), markup=False)
    path = command.path_of(out, None if quick else "writer.json")
    if path is not None:
        write(path, result)
        console.print(f"Written: {path}")


def _medians(samples: list[Samples]) -> str:
    """The medians of a part, as soon as it is measured."""
    return "\n".join(
        ", ".join(f"{name} {value}" for name, value in each.case.items())
        + ": "
        + ", ".join(f"{name} {np.median(values):.3g}" for name, values in each.raw.items())
        for each in samples
    )


if __name__ == "__main__":
    app()
