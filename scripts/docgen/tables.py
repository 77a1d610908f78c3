"""Markdown tables whose columns are text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.markdown import Row, number_table


def table(headings: Row, rows: Sequence[Row]) -> str:
    return number_table(headings, rows, words=len(headings))


def sentence(docstring: str | None) -> str:
    """A docstring on one line, in Markdown."""
    return " ".join((docstring or "").split()).replace("``", "`")
