"""Shows the progress of a run: a spinner on a terminal, elsewhere a line for each event."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from bench.servers.engines import EngineServer


class Display:
    """Progress on ``console``."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def waiting(self, title: str) -> Iterator[None]:
        """A spinner while the block runs."""
        self.console.print(title)
        with self.console.status(title):
            yield

    @contextlib.contextmanager
    def starting(self, engines: Sequence[EngineServer]) -> Iterator[Callable[[EngineServer, float], None]]:
        """Yields a function to call when a server is ready, with its age in seconds."""
        with self.waiting(f"Starting {len(engines)} vLLM servers: {', '.join(engine.name for engine in engines)}"):
            yield lambda engine, seconds: self.console.print(f"  {engine.name} ready after {seconds:.0f} s")

    @contextlib.contextmanager
    def counting(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Counts to ``total``. Yields a function to call after each unit."""
        self.console.print(f"{title} ({total} {'request' if total == 1 else 'requests'})")
        done = 0
        with self.console.status(title) as status:

            def count() -> None:
                nonlocal done
                done += 1
                status.update(f"{title}: {done} of {total}")

            yield count
