"""Shows a progress bar on stderr, if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], object]
"""A function that gets the number of units of work done since its last call."""


def silent(_: int) -> None:
    """An ``Advance`` that shows nothing."""


@contextmanager
def bar(title: str, total: int, unit: str = "") -> Iterator[Advance]:
    """Show a bar for ``total`` units of work. With ``unit`` "bytes" it shows kB, MB or GB. It vanishes at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)
