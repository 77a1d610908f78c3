"""``python -m bench.plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import OUTPUT, RESULTS
from bench.plot import kinds, links, timeline
from bench.plot.series import ResultError, Series

TIMELINE, SWEEP = "timeline.png", "by-link.png"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE|DIR]...",
            exists=True,
            show_default=False,
            help="Results as JSON, and folders with traces. Default: every result in bench/results.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            show_default=False,
            help="Default: beside each file; build/bench for those in bench/results.",
        ),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option("--request", "-r", metavar="ID", show_default=False, help="The request of a folder's timeline."),
    ] = None,
) -> None:
    """Draw results.

    The cells of a file show its kind. This needs no engine and no GPU.

    - `python -m bench.serve`: time to first token, its ratio to whole-request push, and exposed time, by prompt length
      and mode. With several speeds of an emulated link, in one file or in several files, also a sweep over them.

    - `python -m bench.forward`: exposed time by prompt length, and the same sweep.

    - `python -m bench.push` and `python -m bench.kernel`: the pictures that these write beside their JSON.

    - A folder of traces, such as `DIR/trace` after `make demo ARGS="--keep-logs DIR"`: the timeline of a typical push
      of each mode, side by side, as `timeline.png`. With `--request`: all work of P and D for one request.

    Exit status: 0, or 2 if something cannot be drawn.

    - python -m bench.plot bench/results/serve.json

    - python -m bench.plot serve-1gbit.json serve-2gbit.json serve-5gbit.json --out pictures

    - python -m bench.plot DIR/trace
    """
    every = paths or sorted(RESULTS.glob("*.json"))
    measured: list[Series] = []
    files = 0
    try:
        for path in every:
            if path.is_dir():
                picture = (out or path) / TIMELINE
                typer.echo(f"{picture}: {timeline.draw(path, picture, request)}")
                continue
            try:
                kind, result = kinds.read(path)
            except ResultError as error:
                if paths:
                    raise
                typer.echo(f"left out: {error}")
                continue
            picture = _folder(path, out) / f"{path.stem}.png"
            for drawn in kind.draw(result, picture, kinds.title(result, path)):
                typer.echo(str(drawn))
            if kind.series is not None:
                measured += kind.series(result)
                files += 1
        if paths and files > 1 and len(links.speeds(measured)) > 1:
            picture = _folder(every[0], out) / SWEEP
            links.draw(measured, picture, "By the speed of the link")
            typer.echo(str(picture))
    except ResultError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


def _folder(path: Path, out: Path | None) -> Path:
    """The folder for a result's pictures: beside the result, but not in the committed results."""
    return out or (OUTPUT if path.resolve().parent == RESULTS else path.parent)


if __name__ == "__main__":
    app()
