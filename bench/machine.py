"""This machine's processor, GPUs and GPU driver. Initialises none of them."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 30.0


def machine() -> dict[str, object]:
    """A description of the machine, ready for JSON. It lacks ``gpus`` on a machine without a GPU."""
    found: dict[str, object] = {"system": platform.platform(), "cpus": os.cpu_count(), "processor": processor()}
    every = [{"name": name, "memory_mib": int(mib)} for name, mib, _ in _gpus()]
    return found | ({"gpus": every} if every else {})


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name, or else its architecture."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def driver() -> str | None:
    """Version of NVIDIA's driver; None without a GPU."""
    return next((version for _, _, version in _gpus()), None)


@cache
def _gpus() -> list[tuple[str, str, str]]:
    """Name, MiB of memory and driver of each GPU that the driver shows."""
    try:
        output = subprocess.run(GPU_QUERY, capture_output=True, text=True, check=True, timeout=QUERY_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # without a driver that answers, no GPU can be used
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in output.splitlines() if line.count(",") >= 2]
    return [(name, mib if mib.isdigit() else "0", version) for name, mib, version in rows]
