"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, ...]


def table(headings: Row, rows: Sequence[Row]) -> str:
    return _lines(headings, ("---",) * len(headings), *rows)


def number_table(headings: Row, rows: Sequence[Row], words: int = 1) -> str:
    """A table whose columns but the first ``words`` are numbers, flush right."""
    return _lines(headings, ("---",) * words + ("---:",) * (len(headings) - words), *rows)


def sentence(docstring: str | None) -> str:
    """A docstring on one line, in Markdown."""
    return " ".join((docstring or "").split()).replace("``", "`")


def _lines(*rows: Row) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
