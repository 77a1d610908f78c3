"""The `layerpush` command. Commands import heavy modules themselves, so that `--help` answers at once."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

import layerpush
from layerpush.apps.estimate.command import estimate
from layerpush.apps.extras import require
from layerpush.apps.files.command import files
from layerpush.apps.proxy.command import proxy
from layerpush.apps.proxy.settings import engine_url
from layerpush.apps.terminal import echo
from layerpush.apps.tracing.command import app as trace_app

if TYPE_CHECKING:
    from layerpush.apps.checks.finding import Finding

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=(
        "Layer-wise KV push for vLLM's prefill/decode disaggregation. The prefill engine writes each layer's KV into "
        "the decode engine's memory while it computes the next layer.\n\n"
        "[bold]What would it gain?[/bold]  layerpush estimate MODEL --gpu H100 --link 100gbit\n\n"
        "[bold]Is this machine ready?[/bold]  layerpush doctor\n\n"
        "[bold]Would an engine start?[/bold]  layerpush doctor --kv-transfer-config '{...}'\n\n"
        "[bold]See it work without a GPU:[/bold]  make demo, in a checkout\n\n"
        "[bold]Use it:[/bold]  vllm serve MODEL --kv-transfer-config "
        '\'{"kv_connector": "LayerwisePushConnector", "kv_role": "kv_producer", "engine_id": "prefill-0"}\'  '
        'for the prefill engine; "kv_consumer" and "decode-0" for the decode engine; then\n\n'
        "layerpush proxy --prefill URL --decode URL\n\n"
        "[bold]Why was it slow?[/bold]  layerpush trace summary DIR"
    ),
)
app.command()(proxy)
app.command()(files)
app.command()(estimate)
app.add_typer(trace_app, name="trace")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"layerpush {layerpush.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    transfer_config: Annotated[
        str | None,
        typer.Option(
            "--kv-transfer-config",
            metavar="JSON",
            help="Check this value of vLLM's option of the same name, too; @FILE reads it from a file.",
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ask the side channel of a running engine, too: what it is, and whether it pairs with this one.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array, one object per check, instead of a table.")
    ] = False,
) -> None:
    """Check this machine before an engine starts: installation, environment variables and settings, with advice.

    Run it with the engine's Python and the engine's environment variables. It checks Python, vLLM and its version,
    torch's companions, layerpush's plugin, NIXL and UCX (it creates an agent), transports, GPU or CPU, and
    the side-channel port. No model is loaded.

    Example:  VLLM_NIXL_SIDE_CHANNEL_PORT=5700 layerpush doctor

    Example:  layerpush doctor --kv-transfer-config @decode.json --peer 10.0.0.1:5600

    Exit status: 0, 1 if a check failed, or 2 for bad options. A warning is not a failure.
    """
    address = None if peer is None else _address(peer)
    # vLLM binds its logger to sys.stdout at import, and other imports print. Keep stdout for the findings.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    out = sys.stdout
    findings: list[Finding] = []
    with contextlib.redirect_stdout(sys.stderr):
        from layerpush.apps.doctor import examine

        for finding in examine(transfer_config, address):
            findings.append(finding)
            if not as_json:
                _print_finding(finding, out)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    verdicts = [str(finding.verdict) for finding in findings]
    if not as_json:
        typer.echo(
            f"\n{verdicts.count('ok')} ok, {verdicts.count('warn')} to consider, {verdicts.count('fail')} failed"
        )
    raise typer.Exit(1 if "fail" in verdicts else 0)


@app.command()
def metrics(
    engine: Annotated[
        str, typer.Option(metavar="URL", parser=engine_url, help="API server of the engine.")
    ] = "http://127.0.0.1:8000",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8001,
) -> None:
    """Serve an engine's /metrics, and nothing else, on a port of its own.

    Whoever may read an engine's metrics on its own port may use its whole API there. A network policy or a firewall
    can open this port instead.

    Example:  layerpush metrics --engine http://127.0.0.1:8000 --host 0.0.0.0 --port 8001

    Exit status: 0 after SIGTERM or SIGINT, 1 if the port is not available, 2 for bad options or a missing package.
    """
    require("metrics", "proxy")

    from layerpush.apps.metrics_port import serve

    try:
        serve(engine, host, port)
    except OSError as error:
        echo(f"layerpush metrics: {error}", err=True)
        raise typer.Exit(1) from None


_NEXT_LINE = "\n" + " " * 24


def _address(text: str) -> tuple[str, int]:
    """Host and port. Raises ``typer.BadParameter``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT, such as 10.0.0.1:5600", param_hint="--peer")
    return host.strip("[]"), int(port)


def _print_finding(finding: Finding, out: TextIO) -> None:
    """Print one finding at once, because all checks take up to 20 s."""
    colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.verdict]
    mark = typer.style(f"{finding.verdict:4}", fg=colour, bold=True)
    echo(f"  {finding.check:18}{finding.found.replace(chr(10), _NEXT_LINE)}", out, mark=mark)
    for advice in filter(None, finding.advice.split("\n")):
        echo(f"      {'':18}-> {advice}", out)


def _reflowed(documented: object) -> str:
    """The docstring without the line breaks in its paragraphs. typer keeps them, for terminals of any width."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(documented) or "").split("\n\n"))


for _command in (*app.registered_commands, *trace_app.registered_commands):
    _command.help = _reflowed(_command.callback)
