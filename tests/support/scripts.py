"""What scripts of this repository install for tests."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_HERE = 3
"""A script's exit status where it cannot do its work: a package index lacks a package, or there is no C compiler."""


def made_by(script: str) -> Path:
    """The folder with the results of `scripts/SCRIPT`. Skips the test where the script cannot do its work."""
    reason = _run(script)
    if reason is not None:
        pytest.skip(f"scripts/{script} cannot do its work here: {reason}")
    return ROOT / "build" / script


@functools.cache
def _run(script: str) -> str | None:
    """Returns the reason why the script cannot do its work; None if it has done it."""
    done = subprocess.run([ROOT / "scripts" / script], capture_output=True, text=True, check=False)
    assert done.returncode in (0, NOT_HERE), done.stdout + done.stderr
    return done.stderr.strip() if done.returncode == NOT_HERE else None
