"""The program that ``scripts/gpu-bench`` runs, once it has chosen an interpreter."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from bench import ROOT
from bench.command import names
from bench.gpu.host import GpuHostError, environment, gpu_mib
from bench.gpu.parts import PARTS, Room, Step, TooSmallError, steps_of
from bench.servers.interrupts import Interrupted, Interrupts
from bench.servers.processes import start

ALL = "all"
MODEL = Path(tempfile.gettempdir()) / "layerpush-llama-3b"
LIKE_H200_MIB = 143_771
"""The GPU's memory for ``--dry-run``."""
FAILED, BROKEN = 1, 2
GRACE_S = 45
"""A step has this time to end its processes after SIGTERM; it counts as time of the part."""
LATE = (124, 137)
"""Statuses of ``timeout``."""

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

    Each part leaves its JSON and logs in the folder. At its time limit the bench stops a part with all its
    processes and begins the next.

    Exit status: 0, or 1 if a part failed or ran out of time, or 2 without a GPU.

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
    except (GpuHostError, TooSmallError) as error:
        typer.echo(f"gpu-bench: {error}", err=True)
        raise typer.Exit(BROKEN) from error
    if dry_run:
        _show(steps, minutes)
        return
    raise typer.Exit(_run(steps, out, minutes))


def _run(steps: dict[str, list[Step]], out: Path, minutes: float) -> int:
    """Run the parts and return the exit status. The first step that fails, or is out of time, ends its part."""
    failed = False
    (out / "logs").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="layerpush-gpu-") as scratch:
        variables = environment(os.environ, Path(scratch))
        try:
            with Interrupts():
                for part, each in steps.items():
                    typer.echo(f"== {part}: {PARTS[part]}")
                    end = time.monotonic() + 60 * minutes
                    for step in each:
                        name = f"{part}-{step.name}"
                        status = _status(step, out / "logs" / f"{name}.log", end - time.monotonic(), variables)
                        typer.echo(f"{name}: status {status}{', out of time' if status in LATE else ''}")
                        if status:
                            failed = True
                            break
        except Interrupted as interrupted:
            typer.echo(f"{interrupted}; all processes have ended.", err=True)
            return interrupted.exit_status
    typer.echo(f"Written: {out}")
    return FAILED if failed else 0


def _status(step: Step, log: Path, seconds: float, variables: dict[str, str]) -> int:
    """Run a step in a process group, which always ends, and show its output. Returns its status."""
    limit = ["timeout", f"--kill-after={GRACE_S}", f"{max(1.0, seconds - GRACE_S):.0f}"]
    process = start([*limit, sys.executable, *step.arguments], log, cwd=ROOT, env=variables)
    try:
        return process.wait()
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        typer.echo(log.read_text(errors="replace"))


def _show(steps: dict[str, list[Step]], minutes: float) -> None:
    for part, each in steps.items():
        typer.echo(f"{part}: at most {minutes:g} minutes")
        for step in each:
            typer.echo(f"  {step.name}: {shlex.quote(sys.executable)} {step}")


if __name__ == "__main__":
    app()
