"""Debian's Prometheus, which `scripts/prometheus` downloads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "build/prometheus/usr/bin"
NOT_HERE = 3
"""The exit status of `scripts/prometheus` where apt-get has no such package."""


def programs() -> Path:
    """The folder with `prometheus` and `promtool`. Skips the test where there is no such package."""
    done = subprocess.run([ROOT / "scripts" / "prometheus"], capture_output=True, text=True, check=False)
    if done.returncode == NOT_HERE:
        pytest.skip(f"there is no Prometheus here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return PROGRAMS
