"""UCX: its version, and this process's settings."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

SETTINGS = "UCX_"
LIBRARY = "libucp"
NIXL_PACKAGES = ("nixl-cu13", "nixl-cu12", "nixl-rocm", "nixl")
"""Packages that may contain the library."""
ASK_TIMEOUT_S = 30.0
# In a process of its own: UCX installs signal handlers and memory hooks when it is loaded.
_ASK = "import sys; from bench.ucx import version_of; print(version_of(sys.argv[1]) or '')"


def version() -> str | None:
    """The version of the UCX that this process has loaded, else of NIXL's. None if there is none."""
    for path in _loaded():
        return version_of(path)
    for path in _bundled():
        return _version_in_child(path)
    return None


def of_this_process() -> dict[str, object]:
    """UCX's version and settings, ready for JSON. Call it after this process has created an agent, which loads UCX."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    return {"ucx": version(), "ucx_settings": settings}


def version_of(library: str) -> str | None:
    """The version of a library. Loads it; raises ``OSError`` if that fails."""
    ask = ctypes.CDLL(library).ucp_get_version_string
    ask.restype = ctypes.c_char_p
    text: bytes | None = ask()
    return text.decode() if text else None


def _loaded() -> list[str]:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if f"/{LIBRARY}" in line}
    return sorted(mapped)


def _bundled() -> list[str]:
    found = []
    for package in NIXL_PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # one package for each kind of GPU; one is enough
        found += [str(file.locate()) for file in files if file.name.startswith(f"{LIBRARY}-")]
    return found


def _version_in_child(path: str) -> str | None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _ASK, path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=ASK_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None  # NIXL cannot load this library either
    return done.stdout.strip() or None
