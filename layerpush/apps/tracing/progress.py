"""Shows a progress bar on stderr, if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], object]
"""Gets the units of work since its last call."""


def silent(_: int) -> None:
    """For callers that show nothing."""


@contextmanager
def bar(what: str, total: int, unit: str = "") -> Iterator[Advance]:
    """Show a bar for ``total`` units of work. With ``unit`` "bytes" it shows kB, MB or GB. It vanishes at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
