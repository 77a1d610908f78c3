"""The figures of an unfinished run, in a file that a killed run leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import write

Body = Callable[[Sequence[Any], Mapping[str, object]], Mapping[str, object]]


class Unfinished:
    """``forward.unfinished.json`` beside ``out``, ``forward.json``. ``body`` makes its JSON from the answers so far and
    the description of the processes. ``out`` None: no file.
    """

    def __init__(self, out: Path | None, body: Body) -> None:
        self.path = None if out is None else out.with_suffix(".unfinished.json")
        self._body = body

    def keep(self, answers: Sequence[Any], about: Mapping[str, object]) -> None:
        """Replace the file by a new one. A kill meanwhile leaves the old one."""
        if self.path is not None:
            fresh = self.path.with_suffix(".new")
            write(fresh, self._body(answers, about))
            fresh.rename(self.path)

    def remove(self) -> None:
        """Delete the file: the final result is written, or the figures mean nothing."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
