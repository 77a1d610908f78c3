"""`layerpush trace`. Commands import heavy modules themselves, so that `--help` answers at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerpush.apps.terminal import echo

if TYPE_CHECKING:
    from layerpush.apps.tracing.requests import TraceSet

Folders = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...",
        exists=True,
        file_okay=False,
        help="The `trace_dir` of P and of D, or copies of both from two hosts; with their subfolders.",
    ),
]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help=(
        "Where did a request's time go? These commands read the records of P and D in `trace_dir`.\n\n"
        '[bold]Record:[/bold]  set  "trace_dir": "/var/tmp/layerpush"  in `kv_connector_extra_config` of P and of D, '
        "and copy both directories to one place if they are on two hosts. The handshake between D and P measures the "
        "offset of the two clocks.\n\n"
        "[bold]Look:[/bold]  layerpush trace summary DIR\n\n"
        "[bold]Then:[/bold]  layerpush trace plot DIR --request ID  or  layerpush trace merge DIR  and open its file "
        "in https://ui.perfetto.dev"
    ),
)


@app.command()
def merge(
    folders: Folders,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", dir_okay=False, help="File for the merged trace.")
    ] = Path("layerpush-trace.json"),
) -> None:
    """Merge the traces of P and D into one file for ui.perfetto.dev or chrome://tracing.

    The file has one process for each engine rank and one for D's scheduler. Arrows lead from D's registration to P's
    push and from P's completion to D. All times are on D's clock. The command prints the offset of the clocks and gaps
    in the traces, and writes both into the file.

    Example:  layerpush trace merge /var/tmp/layerpush --out merged.json

    Exit status: 0, or 2 if the folders have no traces.
    """
    from layerpush.apps.tracing.perfetto import chrome_trace
    from layerpush.apps.tracing.requests import read_traces

    with _errors_in_one_line():
        traces = read_traces(folders)
        with out.open("wb") as file:
            file.writelines(chrome_trace(traces))
    _print_notes(traces)
    echo(f"{out}: {len(traces.requests)} requests; open it in https://ui.perfetto.dev")


@app.command()
def plot(
    folders: Folders,
    request: Annotated[
        str | None,
        typer.Option(
            "--request",
            "-r",
            metavar="ID",
            help="P's or D's request id, the X-Request-Id, or a unique part of it. Default: the slowest request.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", dir_okay=False, help="File for the picture, .png or .svg."),
    ] = Path("layerpush-request.png"),
) -> None:
    """Draw one request: the parts of D's wait, and for each layer the time of its computation and of its WRITEs.

    Example:  layerpush trace plot /var/tmp/layerpush --request ID --out request.svg

    Exit status: 0, or 2 if there are no traces, no such request, or no matplotlib.
    """
    from layerpush.apps.tracing.breakdown import slowest
    from layerpush.apps.tracing.picture import draw_request
    from layerpush.apps.tracing.requests import read_traces

    with _errors_in_one_line():
        traces = read_traces(folders)
        chosen = slowest(traces.requests, 1)[0].request if request is None else traces.find(request)
        draw_request(chosen, out)
    _print_notes(traces)
    echo(f"{out}: {chosen.name}")


@app.command()
def summary(
    folders: Folders,
    top: Annotated[int, typer.Option("--top", "-n", min=1, help="Number of slowest requests to list.")] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object instead, with times in seconds.")
    ] = False,
) -> None:
    """Show the parts of the slowest requests' time, and the hand-over: from the last layer to D's first token.

    The parts follow each other and add up to the total: [bold]queue[/bold], until P plans the first chunk;
    [bold]prefill[/bold], until the last layer is ready; [bold]exposed[/bold], until the last WRITE has landed;
    [bold]notification[/bold], until D has all completions; [bold]D wait[/bold], until D's scheduler gets the report;
    [bold]schedule[/bold], until a step begins; [bold]first step[/bold], until D's scheduler has the first token. The
    hand-over is all from exposed on. The token's way to the client is not in the traces.

    Example:  layerpush trace summary /var/tmp/layerpush --top 20

    Exit status: 0, or 2 if the folders have no traces.
    """
    from layerpush.apps.tracing.report import summary_data, summary_text
    from layerpush.apps.tracing.requests import read_traces

    with _errors_in_one_line():
        traces = read_traces(folders, outlines=True)
    echo(json.dumps(summary_data(traces, top), indent=2) if as_json else summary_text(traces, top))


def _print_notes(traces: TraceSet) -> None:
    from layerpush.apps.tracing.report import notes

    for note in notes(traces):
        echo(note, err=True)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Prints an error that the user can correct as one line."""
    from layerpush.apps.tracing.folder import FolderError
    from layerpush.apps.tracing.picture import PictureError
    from layerpush.apps.tracing.requests import RequestError

    try:
        yield
    except (FolderError, RequestError, PictureError, OSError) as error:
        echo(f"layerpush trace: {error}", err=True)
        raise typer.Exit(2) from error
