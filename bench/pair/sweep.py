"""A whole run of two processes: every link in turn, and on it every case; what ends it, and how that is said."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bench.pair.orders import WrongBytesError
from bench.pair.processes import Pair, PairError
from bench.pair.settings import Settings
from bench.pair.wires import Wire
from layerpush.apps.demo.interrupts import Interrupted, Interrupts
from layerpush.apps.demo.link import LinkError

PACKAGES = ("layerpush", "nixl", "torch", "triton", "numpy")
"""Whose versions are in the results."""
StagingMib = Annotated[int, typer.Option(min=2, help="Staging memory of each side: staging_bytes.")]
ProgressThread = Annotated[
    str, typer.Option(help="NIXL's progress thread. calm: as with LAYERPUSH_CALM=1. spin: as NIXL has it. off.")
]
PROGRESS_THREADS = ("calm", "spin", "off")
AgentThreads = Annotated[int, typer.Option(min=0, help="Threads of a NIXL agent; vLLM has 4.")]
Seed = Annotated[int, typer.Option(help="Of block ids and bytes.")]
Corrupt = Annotated[
    bool, typer.Option("--corrupt", help="Damage one byte on D before it is checked: the run has to fail.")
]


class Weighty(Protocol):
    @property
    def weight(self) -> int:
        """About proportional to the time of a sample."""


Order = tuple[str, Weighty, object]
"""A link, what is measured on it, and what P is told."""
WireOf = Callable[[str, Interrupts], AbstractContextManager[Wire]]


def sweep(
    console: Console,
    package: str,
    wire_of: WireOf,
    orders: Sequence[Order],
    settings: Settings,
    line: Callable[[Any], str],
) -> tuple[list[Any], dict[str, object]]:
    """P's answers to all orders, and what the processes say of themselves, by link. Those of a link follow each other.

    Prints the ``line`` of each answer. Raises ``typer.Exit`` with status 1 for wrong bytes, 2 when it could not be
    carried out, 128 + signal when it was interrupted; main thread only: it installs signal handlers.
    """
    try:
        with Interrupts() as interrupts:
            return _sweep(console, package, lambda link: wire_of(link, interrupts), orders, settings, line)
    except Interrupted as interrupted:
        console.print(f"[yellow]{interrupted}; both processes and their link are gone, nothing is written.[/]")
        raise typer.Exit(interrupted.exit_status) from None
    except WrongBytesError as error:
        console.print(f"{error}: nothing is written", style="red", markup=False)
        raise typer.Exit(1) from error
    except (PairError, LinkError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error


def need_cuda(device: str) -> None:
    """Raises ``typer.BadParameter`` where there is no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU")


def time_left(waiting: Sequence[Weighty], done: Sequence[Weighty], seconds: float) -> float:
    """Seconds that ``waiting`` will take, if ``done`` took ``seconds``."""
    return seconds * sum(each.weight for each in waiting) / max(1, sum(each.weight for each in done))


def _sweep(
    console: Console,
    package: str,
    wire_of: Callable[[str], AbstractContextManager[Wire]],
    orders: Sequence[Order],
    settings: Settings,
    line: Callable[[Any], str],
) -> tuple[list[Any], dict[str, object]]:
    answers: list[Any] = []
    about: dict[str, object] = {}
    every, spent = [what for _, what, _ in orders], 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with tempfile.TemporaryDirectory(prefix="layerpush-") as logs, bar:
        task = bar.add_task("cases", total=len(orders), left="")
        for link, here in groupby(orders, key=lambda order: order[0]):
            with wire_of(link) as wire, Pair(package, wire, settings, Path(logs)) as pair:
                about[link] = pair.about
                for _, _, order in here:
                    began = time.monotonic()
                    answers.append(pair.ask(order))
                    spent += time.monotonic() - began
                    left = time_left(every[len(answers) :], every[: len(answers)], spent)
                    bar.update(task, advance=1, left=f"about {left / 60:.1f} min left")
                    console.print(line(answers[-1]), "" if console.is_terminal else f"  about {left / 60:.1f} min left")
    return answers, about
