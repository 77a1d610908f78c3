"""Lists of a command line: ``"2,16"``, ``"shm,tcp"``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


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
