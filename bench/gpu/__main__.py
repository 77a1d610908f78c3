"""The program that ``scripts/gpu-bench`` runs, once it has chosen an interpreter."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bench import ROOT
from bench.command import names
from bench.gpu.host import HostError, check_compiler, environment, gpu_mib, missing_modules
from bench.gpu.parts import PARTS, Room, Step, TooSmallError, steps_of
from bench.gpu.running import Ending, Ran, Runner
from bench.provenance import provenance
from bench.servers.interrupts import Interrupted, Interrupts

ALL = "all"
RECORD = "gpu-bench.json"
MODEL = Path(tempfile.gettempdir()) / "layerpush-llama-3b"
LIKE_H200_MIB = 143_771
"""The GPU's memory for ``--dry-run``."""
FAILED, BROKEN = 1, 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    parts: Annotated[
        list[str],
        typer.Argument(metavar="PART...", help="; ".join(f"{part}: {what}" for part, what in PARTS.items()) + "; all."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            show_default=False,
            help="Folder for JSON and logs; the bench creates it.",
        ),
    ],
    minutes: Annotated[float, typer.Option(min=0.1, help="Time limit of each part, in minutes.")] = 8.0,
    model: Annotated[
        Path,
        typer.Option(metavar="DIR", file_okay=False, help="Folder of serve's model: 7 GB; to build it, 7 GiB of RAM."),
    ] = MODEL,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and run nothing.")] = False,
) -> None:
    """Measure layerpush on one NVIDIA GPU, part by part, each within eight minutes.

    PYTHON=... chooses the interpreter; else it is that of .venv, else python3. It must have a CUDA build of torch. The
    bench installs and downloads nothing. Two processes, or several engines, share the GPU: KV moves over CUDA IPC.

    Each part leaves its JSON and logs in the folder. gpu-bench.json there has the commands, their exit
    statuses and the versions. At its time limit the bench stops a part with all its processes and begins the next.

    Exit status: 0, or 1 if a part failed or ran out of time, or 2 without a GPU, a module or a C compiler.

    - scripts/gpu-bench kernels --out results

    - PYTHON=/opt/vllm/bin/python scripts/gpu-bench all --out results

    - scripts/gpu-bench all --out results --dry-run
    """
    try:
        wanted = names(",".join(parts), [*PARTS, ALL])
        wanted = list(PARTS) if ALL in wanted else wanted
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    out, model = out.resolve(), model.resolve()
    try:
        room = Room(LIKE_H200_MIB if dry_run else gpu_mib(), model)
        steps = {part: steps_of(part, out, room) for part in wanted}
        if not dry_run:
            _check_modules(wanted)
            check_compiler()
    except (HostError, TooSmallError) as error:
        typer.echo(f"gpu-bench: {error}", err=True)
        raise typer.Exit(BROKEN) from error
    if dry_run:
        _show(steps, minutes)
        return
    raise typer.Exit(_run(steps, out, minutes))


def _run(steps: dict[str, list[Step]], out: Path, minutes: float) -> int:
    """Run the parts and return the exit status. Writes the record after each part."""
    out.mkdir(parents=True, exist_ok=True)
    record = provenance(seed=0) | {"minutes": minutes}
    done: dict[str, list[Ran]] = {}
    with tempfile.TemporaryDirectory(prefix="layerpush-gpu-") as scratch:
        variables = environment(os.environ, Path(scratch))
        runner = Runner(sys.executable, ROOT, out / "logs", 60 * minutes, typer.echo, variables)
        try:
            with Interrupts():
                for part, each in steps.items():
                    typer.echo(f"== {part}: {PARTS[part]}")
                    done[part] = runner.part(part, each)
                    _write(out, record, done)
        except Interrupted as interrupted:
            typer.echo(f"{interrupted}; all processes have ended.", err=True)
            return interrupted.exit_status
    for part, ran in done.items():
        typer.echo(f"{part}: {', '.join(map(str, ran))}")
    typer.echo(f"Written: {out}")
    return FAILED if any(each.ending is not Ending.WELL for ran in done.values() for each in ran) else 0


def _write(out: Path, record: dict[str, object], done: dict[str, list[Ran]]) -> None:
    parts = {part: [each.as_json() for each in ran] for part, ran in done.items()}
    (out / RECORD).write_text(json.dumps(record | {"parts": parts}, indent=1) + "\n")


def _show(steps: dict[str, list[Step]], minutes: float) -> None:
    for part, each in steps.items():
        typer.echo(f"{part}: at most {minutes:g} minutes")
        for step in each:
            typer.echo(f"  {step.name}: {shlex.quote(sys.executable)} {step}")


def _check_modules(wanted: list[str]) -> None:
    missing = missing_modules(wanted)
    if missing:
        lacks = "; ".join(f"for {part}: {', '.join(names)}" for part, names in missing.items())
        raise HostError(f"{sys.executable} lacks, {lacks}. Install them, or choose another with PYTHON=...")


if __name__ == "__main__":
    app()
