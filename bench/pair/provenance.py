"""What only a process with NIXL can say of what it measures with."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

UCX_SETTINGS = "UCX_"


def about_this_process() -> dict[str, object]:
    """UCX's version and settings and the processor, after an agent was made."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(UCX_SETTINGS)}
    return {"ucx": _ucx_version(), "ucx_settings": settings, "processor": _processor()}


def _ucx_version() -> str | None:
    """Of the library that this process has loaded."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libucp" in line}
    for path in sorted(mapped):
        version = ctypes.CDLL(path).ucp_get_version_string
        version.restype = ctypes.c_char_p
        text: bytes | None = version()
        return text.decode() if text else None
    return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
