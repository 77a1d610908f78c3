"""NIXL's LIBFABRIC backend over TCP, in a process that calls `load`. `scripts/libfabric` makes its libraries."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARIES = ROOT / "build/libfabric"
ENVIRONMENT = {"FI_PROVIDER": "tcp", "FI_LOG_LEVEL": "none"}
NOT_HERE = 3
"""The exit status of `scripts/libfabric` where there is no C compiler, or the package index lacks a package."""


@functools.cache
def build() -> str | None:
    """Run the script. Returns the reason why the libraries cannot be put together here; None if they are there."""
    done = subprocess.run([ROOT / "scripts" / "libfabric"], capture_output=True, text=True, check=False)
    assert done.returncode in (0, NOT_HERE), done.stderr
    return done.stderr.strip() if done.returncode == NOT_HERE else None


def require() -> None:
    """Skip the test where the libraries cannot be put together."""
    reason = build()
    if reason is not None:
        pytest.skip(f"there is no LIBFABRIC backend here: {reason}")


def load() -> None:
    """Load the libraries, before NIXL makes an agent with this backend: its plugin finds them by their names then."""
    os.environ.update(ENVIRONMENT)
    for name in ("libcuda.so.1", "libcudart.so.13", "libhwloc.so.15", "libfabric.so.1"):
        ctypes.CDLL(str(LIBRARIES / name))
