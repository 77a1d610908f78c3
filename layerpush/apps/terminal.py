"""What the commands print."""

from __future__ import annotations

from typing import TextIO

import typer

from layerpush.core.wire import one_line


def echo(text: str, file: TextIO | None = None, *, err: bool = False, mark: str = "") -> None:
    """Print text that may have parts from peers, traces or files: line by line, without what a terminal would obey.

    ``mark`` goes before it as it is.
    """
    typer.echo(mark + "\n".join(one_line(line, len(line)) for line in text.split("\n")), file=file, err=err)
