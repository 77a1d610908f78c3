"""The `layerpush` command. Heavy modules are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

import layerpush
from layerpush.apps.proxy.command import proxy
from layerpush.apps.tracing.command import app as trace_app

if TYPE_CHECKING:
    from layerpush.apps.doctor import Finding

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=(
        "Layer-wise KV push for vLLM's prefill/decode disaggregation: the prefill engine writes each layer's KV into "
        "the decode engine's memory while it still computes the next one.\n\n"
        "[bold]Is this machine ready?[/bold]  layerpush doctor\n\n"
        "[bold]See it work, no GPU needed:[/bold]  layerpush demo\n\n"
        "[bold]Use it:[/bold]  vllm serve MODEL --kv-transfer-config "
        '\'{"kv_connector": "LayerwisePushConnector", "kv_role": "kv_producer"}\'  '
        'and  "kv_consumer" for the decode engine; then\n\n'
        "layerpush proxy --prefill URL --decode URL\n\n"
        "[bold]Why was it slow?[/bold]  layerpush trace summary DIR"
    ),
)
app.command()(proxy)
app.add_typer(trace_app, name="trace")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"layerpush {layerpush.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write all figures to FILE as JSON."),
    ] = None,
    plot: Annotated[
        Path, typer.Option(metavar="FILE", dir_okay=False, help="Where the timeline picture (PNG) goes.")
    ] = Path("layerpush-demo.png"),
    model_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Where the random-weight model is built, and found again; by default a cache.",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts each mode is measured with.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Length of each prompt, in tokens.")] = 4096,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Emulate a link of this speed between the engines, for example 1gbit; needs root. Without: loopback.",
        ),
    ] = None,
    keep_logs: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Keep the engines' logs and traces in DIR.")
    ] = None,
) -> None:
    """Watch a real vLLM prefill engine push KV layer by layer, over real NIXL, into a real decode engine, on the CPU.

    Sends the same prompts three ways (by layer, by chunk, whole request) and to one plain engine; prints for each way
    how much of the transfer was left over after prefill, and whether the tokens are right.

    Exit status: 0 if every token is right, 1 if one is not, 2 if the demo could not be carried out. Ctrl-C stops the
    engines and leaves nothing behind.
    """
    from layerpush.apps.demo.command import run_demo

    raise typer.Exit(
        run_demo(
            json_file=json_file,
            plot=plot,
            model_dir=model_dir,
            prompts=prompts,
            prompt_tokens=prompt_tokens,
            link=link,
            keep_logs=keep_logs,
        )
    )


@app.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array, one object per check, instead of a table.")
    ] = False,
) -> None:
    """Check the installation, with the environment variables as they are set here, and say what to do about problems.

    Looks at: Python, vLLM and its version, layerpush's plugin in it, NIXL and UCX (a real agent is made), transports,
    GPU or CPU, calm mode (LAYERPUSH_CALM), and the side-channel port. Run it with the same Python and the same
    variables as the engine.

    Exit status: 0, or 1 if a check failed. A warning is no failure.
    """
    # vLLM logs to what sys.stdout is when it is imported, and other imports print: stdout is for the findings.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    out = sys.stdout
    findings: list[Finding] = []
    with contextlib.redirect_stdout(sys.stderr):
        from layerpush.apps.doctor import examine

        for finding in examine():
            findings.append(finding)
            if not as_json:
                _say(finding, out)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    verdicts = [str(finding.verdict) for finding in findings]
    if not as_json:
        typer.echo(
            f"\n{verdicts.count('ok')} ok, {verdicts.count('warn')} to consider, {verdicts.count('fail')} failed"
        )
    raise typer.Exit(1 if "fail" in verdicts else 0)


def _say(finding: Finding, out: TextIO) -> None:
    """Print one finding as soon as it is known: all of them take a while."""
    colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.verdict]
    mark = typer.style(f"{finding.verdict:4}", fg=colour, bold=True)
    typer.echo(f"{mark}  {finding.check:18}{finding.found}", file=out)
    if finding.advice:
        typer.echo(f"      {'':18}-> {finding.advice}", file=out)
