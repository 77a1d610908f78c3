"""What the commands print."""

from __future__ import annotations

from typing import TextIO

import typer


def echo(text: str, file: TextIO | None = None, *, err: bool = False, mark: str = "") -> None:
    """Print text that may have parts from peers, traces or files, without the characters that a terminal would obey.

    ``mark`` goes before it as it is.
    """
    shown = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
    typer.echo(mark + shown, file=file, err=err)
