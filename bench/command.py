"""The console of a benchmark, and the lists of its command line: ``"2,16"``, ``"shm,loopback"``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

PIPE_WIDTH = 200


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
