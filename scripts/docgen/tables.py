"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, ...]


def table(headings: Row, rows: Sequence[Row]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sentence(docstring: str | None) -> str:
    """A docstring on one line, in Markdown."""
    return " ".join((docstring or "").split()).replace("``", "`")
