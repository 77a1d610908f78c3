"""A whole run of two processes: every case on every link, one after the other, and the messages about its end."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bench.forward.links import Wire
from bench.forward.orders import WrongBytesError
from bench.forward.processes import Pair, PairError
from bench.forward.settings import Settings
from bench.servers.interrupts import Interrupted, Interrupts
from bench.servers.link import LinkError
from bench.unfinished import Unfinished


class Weighted(Protocol):
    @property
    def weight(self) -> int:
        """About proportional to the time of a sample."""


Order = tuple[str, Weighted, object]
"""A link, the case, and the order to P."""
WireOf = Callable[[str, Interrupts], AbstractContextManager[Wire]]


def sweep(
    console: Console,
    wire_of: WireOf,
    orders: Sequence[Order],
    settings: Settings,
    line: Callable[[Any], str],
    unfinished: Unfinished | None = None,
) -> tuple[list[Any], dict[str, object]]:
    """P's answers to all orders, and a description of the processes by link. Orders of one link are consecutive.

    Prints the ``line`` of each answer. ``unfinished`` keeps the answers so far, unless a byte is wrong. Raises
    ``typer.Exit``: status 1 for wrong bytes, 2 for a failed process or link, 128 + signal after a signal. Main thread
    only: it installs signal handlers.
    """
    try:
        with Interrupts() as interrupts:
            return _sweep(console, lambda link: wire_of(link, interrupts), orders, settings, line, unfinished)
    except Interrupted as interrupted:
        console.print(f"[yellow]{interrupted}; both processes and their link are gone, the result is not written.[/]")
        raise typer.Exit(interrupted.exit_status) from None
    except WrongBytesError as error:
        if unfinished is not None:
            unfinished.remove()
        console.print(f"{error}: nothing is written", style="red", markup=False)
        raise typer.Exit(1) from error
    except (PairError, LinkError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error


def time_left(waiting: Sequence[Weighted], done: Sequence[Weighted], seconds: float) -> float:
    """Seconds that ``waiting`` will take, if ``done`` took ``seconds``."""
    return seconds * sum(each.weight for each in waiting) / max(1, sum(each.weight for each in done))


def _sweep(
    console: Console,
    wire_of: Callable[[str], AbstractContextManager[Wire]],
    orders: Sequence[Order],
    settings: Settings,
    line: Callable[[Any], str],
    unfinished: Unfinished | None,
) -> tuple[list[Any], dict[str, object]]:
    answers: list[Any] = []
    about: dict[str, object] = {}
    every, spent = [case for _, case, _ in orders], 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with tempfile.TemporaryDirectory(prefix="layerpush-") as logs, bar:
        task = bar.add_task("cases", total=len(orders), left="")
        for link, here in groupby(orders, key=lambda order: order[0]):
            with wire_of(link) as wire, Pair(wire, settings, Path(logs)) as pair:
                about[link] = pair.about
                for _, _, order in here:
                    began = time.monotonic()
                    answers.append(pair.ask(order))
                    spent += time.monotonic() - began
                    if unfinished is not None:
                        unfinished.keep(answers, about)
                    left = time_left(every[len(answers) :], every[: len(answers)], spent)
                    bar.update(task, advance=1, left=f"about {left / 60:.1f} min left")
                    console.print(line(answers[-1]), "" if console.is_terminal else f"  about {left / 60:.1f} min left")
    return answers, about
