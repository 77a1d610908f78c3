"""Shared by benchmarks: the console, options, their checks, the header and the files of a result."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench import OUTPUT
from bench.pair.lists import names
from bench.pair.settings import Settings
from bench.pair.tables import PATTERNS
from bench.provenance import provenance
from bench.servers.link import LinkError

PACKAGES = ("layerpush", "nixl", "torch", "triton", "numpy")
"""Packages whose versions a result has."""
PIPE_WIDTH = 200
PATTERNS_HELP = "; ".join(f"{name}: {what}" for name, what in PATTERNS.items()) + "."
PROGRESS_THREADS = ("calm", "spin", "off")

StagingMib = Annotated[int, typer.Option(min=2, help="Staging memory of each side: staging_bytes.")]
ProgressThread = Annotated[
    str, typer.Option(help="NIXL's progress thread. calm: as with LAYERPUSH_CALM=1. spin: NIXL's own loop. off: none.")
]
AgentThreads = Annotated[int, typer.Option(min=0, help="Threads of a NIXL agent; vLLM has 4.")]
Device = Annotated[str, typer.Option(help="Device of the memory of both processes: cpu or cuda.")]
Seed = Annotated[int, typer.Option(help="Seed of block ids and bytes.")]
Corrupt = Annotated[
    bool, typer.Option("--corrupt", help="Damage one byte on D before the check: the run must fail with status 1.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="All samples as JSON. Default: a file in build/bench, or nothing with --quick.",
    ),
]


def console() -> Console:
    """A console that prints wide tables, also into a file."""
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


@contextlib.contextmanager
def checked(console: Console) -> Iterator[None]:
    """A bad value of an option ends the command with status 2 and a message."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except LinkError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error


def one_of(text: str, known: tuple[str, ...]) -> Any:
    """One name of ``known``. Raises ``ValueError``."""
    (name,) = names(text, known)
    return name


def need_cuda(device: str) -> None:
    """Raises ``ValueError`` if ``device`` is cuda and this machine has none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU")


def header(settings: Settings, rounds: int, about: Mapping[str, object], started_at: float) -> dict[str, object]:
    """The conditions of a run. ``about`` describes the processes by link, ``started_at`` is of ``time.monotonic``."""
    return provenance(settings.seed, PACKAGES) | {
        "about": about,
        "settings": asdict(settings),
        "rounds": rounds,
        "seconds": round(time.monotonic() - started_at),
    }


def path_of(out: Path | None, name: str | None) -> Path | None:
    """The file of the result: ``out``, else ``name`` in build/bench. None: no file."""
    return out or (None if name is None else OUTPUT / name)
