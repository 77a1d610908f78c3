"""The console of a benchmark, the lists of its command line (``"2,16"``, ``"shm,loopback"``), and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from bench import write
from bench.markdown import Result
from bench.servers.engines import EngineFailedError
from bench.servers.interrupts import Interrupted, Interrupts
from bench.servers.load import RequestFailedError
from bench.servers.workspace import work_directory

PIPE_WIDTH = 200
WRONG, BROKEN = 1, 2
"""Exit statuses."""


def console() -> Console:
    """A console that prints wide tables, also into a file."""
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def numbers(text: str, least: int = 1, most: int | None = None) -> list[int]:
    """``"2,16"``: whole numbers from ``least`` to ``most``, each once. Raises ``ValueError``."""
    said = f"{least} or more" if most is None else f"{least} to {most}"
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < least or (most is not None and int(part) > most):
            raise ValueError(f"{part.strip()!r} is no whole number of {said}")
    return list(dict.fromkeys(map(int, text.split(","))))


def names(text: str, known: Sequence[str]) -> list[str]:
    """``"a,b"``: names of ``known``, each once. Raises ``ValueError``."""
    wanted = [part.strip() for part in text.split(",")]
    for name in wanted:
        if name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(wanted))


@contextmanager
def running(out: Console, keep_logs: Path | None) -> Iterator[tuple[Path, Interrupts]]:
    """The folder for logs and traces. The failure of a server or of a request ends the command, as a signal does."""
    try:
        with Interrupts() as interrupts, work_directory(keep_logs) as work:
            yield work, interrupts
    except Interrupted as interrupted:
        out.print(f"[yellow]{interrupted}; all servers are down.[/]")
        raise typer.Exit(interrupted.exit_status) from None
    except (EngineFailedError, RequestFailedError) as error:
        out.print(str(error), style="red", markup=False)
        raise typer.Exit(BROKEN) from None


def publish(out: Console, path: Path, result: Result, table: Callable[[Result], str]) -> None:
    """Print the table of a result, and write the result. One with wrong answers ends the command instead."""
    if result["wrong"]:
        out.print(f"{result['wrong']} answers are wrong. Nothing is written: these times mean nothing.", style="red")
        raise typer.Exit(WRONG)
    out.print(table(result), markup=False, soft_wrap=True)
    write(path, result)
