"""``python -m bench.plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import OUTPUT, RESULTS
from bench.plot import kinds, links, timeline
from bench.plot.series import ResultError, Series

TIMELINE, SWEEP = "timeline.png", "links.png"

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

    What a file is, its cells tell; no engine and no GPU is needed.

    - Of `python -m bench.serve`: by prompt length, for each mode, time to first token, its ratio
      to whole-request push, and what is exposed after prefill. If there are several speeds of an emulated link, in one
      file or in several that are named together, also the sweep over them.

    - Of `python -m bench.forward`: what is exposed by prompt length, `FILE-exposed.png`, and the same sweep.

    - Of `python -m bench.push` and `python -m bench.kernel`: the pictures that these leave beside their JSON.

    - Of a folder: the timeline of one request, `timeline.png`. A folder of traces, such as `DIR/trace` after
      `layerpush demo --keep-logs DIR`, gives a typical push of each mode, side by side; `--request` gives all that
      P and D did for one request.

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
    """Where pictures of a result go: beside it, but not into the committed results."""
    return out or (OUTPUT if path.resolve().parent == RESULTS else path.parent)


if __name__ == "__main__":
    app()
