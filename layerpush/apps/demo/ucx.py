"""Which UCX NIXL brings along, and what this process has made of it."""

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
"""In any of which the library may be."""
ASK_TIMEOUT_S = 30.0
# A process of its own: loading UCX puts handlers of signals and hooks of memory into the process that does it.
_ASK = "import sys; from layerpush.apps.demo.ucx import version_of; print(version_of(sys.argv[1]) or '')"


def version() -> str | None:
    """Of the library that this process has loaded, or else of the one in NIXL's package. None if there is none."""
    for path in _loaded():
        return version_of(path)
    for path in _bundled():
        return _asked(path)
    return None


def of_this_process() -> dict[str, object]:
    """UCX's version and settings, after an agent was made. Ready for JSON."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    return {"ucx": version(), "ucx_settings": settings}


def version_of(library: str) -> str | None:
    """Loads it, if it is not loaded yet. Raises ``OSError`` if it cannot be."""
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
            continue  # there is one for each kind of GPU, and one is enough
        found += [str(file.locate()) for file in files if file.name.startswith(f"{LIBRARY}-")]
    return found


def _asked(path: str) -> str | None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _ASK, path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=ASK_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None  # a library that does not load here: NIXL cannot have been used either
    return done.stdout.strip() or None
