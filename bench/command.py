"""The console of a benchmark, and the lists of its command line: ``"2,16"``, ``"shm,loopback"``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

PIPE_WIDTH = 200


def console() -> Console:
    """A console that prints wide tables, also into a file."""
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def numbers(text: str) -> list[int]:
    """``"2,16"``: positive whole numbers, each once. Raises ``ValueError``."""
    return list(dict.fromkeys(_positive(part) for part in text.split(",")))


def percents(text: str) -> list[int]:
    """``"0,90"``: whole numbers from 0 to 99, each once. Raises ``ValueError``."""
    return list(dict.fromkeys(_percent(part) for part in text.split(",")))


def names(text: str, known: Sequence[str]) -> list[str]:
    """``"a,b"``: names of ``known``, each once. Raises ``ValueError``."""
    return list(dict.fromkeys(_known(text.split(","), known)))


def _positive(text: str) -> int:
    if not text.strip().isdigit() or not int(text):
        raise ValueError(f"{text.strip()!r} is no positive whole number")
    return int(text)


def _percent(text: str) -> int:
    if not text.strip().isdigit() or int(text) > 99:
        raise ValueError(f"{text.strip()!r} is no whole number from 0 to 99")
    return int(text)


def _known(wanted: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    for name in (part.strip() for part in wanted):
        if name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
        yield name
