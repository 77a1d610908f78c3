"""Starts benchmarks as users do, and looks for their children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 280


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """``python -m MODULE ARGUMENTS`` at the root of the checkout."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int, count: int) -> list[int] | None:
    """The child processes if there are ``count``, else None."""
    found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found if len(found) == count else None
