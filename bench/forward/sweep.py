"""A whole run of two processes: every case on every link, one after the other, and the messages about its end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import typer
from rich.console import Console

from bench.forward.cells import CaseSamples
from bench.forward.links import wire_of
from bench.forward.orders import Measure
from bench.forward.processes import PairError, ProcessPair
from bench.forward.settings import ForwardSettings
from bench.servers.interrupts import Interrupted, Interrupts
from bench.servers.link import LinkError

Keep = Callable[[Sequence[CaseSamples], Mapping[str, object]], None]


def sweep(
    console: Console, orders: Sequence[tuple[str, Measure]], settings: ForwardSettings, keep: Keep
) -> tuple[list[CaseSamples], dict[str, object]]:
    """P's answers to all orders, and a description of the processes by link. Orders of one link are consecutive.

    Prints each answer, and gives ``keep`` all answers so far. Raises ``WrongBytesError``, or ``typer.Exit``: status 2
    for a failed process or link, 128 + signal after a signal. Main thread only: it installs signal handlers.
    """
    answers: list[CaseSamples] = []
    about: dict[str, object] = {}
    try:
        with Interrupts() as interrupts, tempfile.TemporaryDirectory(prefix="layerpush-") as logs:
            for link, here in groupby(orders, key=lambda order: order[0]):
                with wire_of(link, interrupts) as wire, ProcessPair(wire, settings, Path(logs)) as pair:
                    about[link] = pair.about
                    for _, order in here:
                        answers.append(pair.ask(order))
                        keep(answers, about)
                        console.print(f"{len(answers)}/{len(orders)}  {answers[-1]}")
    except Interrupted as interrupted:
        console.print(f"[yellow]{interrupted}; both processes and their link are gone, the result is not written.[/]")
        raise typer.Exit(interrupted.exit_status) from None
    except (PairError, LinkError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    return answers, about
