"""NIXL's LIBFABRIC backend over TCP, in a process that calls `load`. `scripts/libfabric` makes its libraries."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = ROOT / "build/libfabric"
ENVIRONMENT = {"FI_PROVIDER": "tcp", "FI_LOG_LEVEL": "none"}


def load() -> None:
    """Load the libraries, before NIXL makes an agent with this backend: its plugin finds them by their names then."""
    os.environ.update(ENVIRONMENT)
    for name in ("libcuda.so.1", "libcudart.so.13", "libhwloc.so.15", "libfabric.so.1"):
        ctypes.CDLL(str(LIBRARIES / name))
