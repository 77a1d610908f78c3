"""Checks in P's traces that vLLM called the hook of each layer: else pushes begin only after the forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from bench.figures import read_pushes
from layerpush.telemetry.trace_records import PushRecord

LEAST_BLOCKS = 2
"""vLLM may replay a step of fewer tokens as one CUDA graph, in which no hook is called."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def problems(pushes: Iterable[PushRecord]) -> list[str]:
    """The problems, in words: swept layers in a large chunk, or no large chunk at all."""
    found, checked = [], 0
    for push in pushes:
        swept = [chunk for chunk, _, _, hooked in push.ready if not hooked]
        for number, chunk in enumerate(push.chunks):
            if push.mode == "request" or chunk.cached or chunk.end_block - chunk.start_block < LEAST_BLOCKS:
                continue
            checked += 1
            if layers := swept.count(number):
                found.append(f"{push.request_id}, chunk {number}: {layers} layers called no hook")
    return found if checked else ["no push by layer has a chunk of several blocks"]


@app.command()
def main(
    traces: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Each is the trace_dir of a P.")],
) -> None:
    """Check that every layer of every step called its hook, except in steps of a few tokens. Exit status 1 if not."""
    found = problems(push for trace in traces for push in read_pushes(trace))
    for each in found:
        typer.echo(each)
    if found:
        raise typer.Exit(1)
    typer.echo("every layer called its hook")


if __name__ == "__main__":
    app()
