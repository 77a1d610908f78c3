"""The version of NIXL's UCX."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

LIBRARY = "libucp"
NIXL_PACKAGES = ("nixl-cu13", "nixl-cu12", "nixl-rocm", "nixl")
"""Packages that may contain the library."""
ASK_TIMEOUT_S = 30.0
_ASK = (
    "import ctypes, sys; ask = ctypes.CDLL(sys.argv[1]).ucp_get_version_string; "
    "ask.restype = ctypes.c_char_p; print(ask().decode())"
)


def version() -> str | None:
    """None if NIXL has none. A process of its own loads it: UCX installs signal handlers and memory hooks."""
    for path in _bundled():
        command = [sys.executable, "-c", _ASK, path]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ASK_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError):
            return None  # NIXL cannot load this library either
        return done.stdout.strip() or None
    return None


def _bundled() -> list[str]:
    found = []
    for package in NIXL_PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # one package for each kind of GPU; one is enough
        found += [str(file.locate()) for file in files if file.name.startswith(f"{LIBRARY}-")]
    return found
