"""Shows the progress of a run: live on a terminal, elsewhere one line for each event."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.servers.engines import Engine


class Display:
    """Progress on ``console``."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def waiting(self, title: str) -> Iterator[None]:
        """A spinner while the block runs."""
        self.console.print(title)
        with self._progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
            progress.add_task("", total=None)
            yield

    @contextlib.contextmanager
    def starting(self, engines: Sequence[Engine]) -> Iterator[Callable[[Engine, float], None]]:
        """A spinner per server. Yields a function to call when a server is ready, with its age in seconds."""
        self.console.print(f"Starting {len(engines)} vLLM servers: {', '.join(engine.name for engine in engines)}")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with self._progress(*columns) as progress:
            tasks = {engine.name: progress.add_task(engine.name, total=1) for engine in engines}

            def on_ready(engine: Engine, seconds: float) -> None:
                progress.update(tasks[engine.name], completed=1, visible=False)
                progress.console.print(f"  {engine.name} ready after {seconds:.0f} s")

            yield on_ready

    @contextlib.contextmanager
    def counting(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar that counts to ``total``. Yields a function to call after each unit."""
        if not self.console.is_terminal:
            self.console.print(f"{title} ({total} {'request' if total == 1 else 'requests'})")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with self._progress(*columns, TimeElapsedColumn()) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)

    def _progress(
        self, *columns: SpinnerColumn | TextColumn | BarColumn | MofNCompleteColumn | TimeElapsedColumn
    ) -> Progress:
        return Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
