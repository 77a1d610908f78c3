"""Processes of this machine: their start, and those of a process group, from /proc."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def start(command: Sequence[str], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command without input, in a process group of its own. Its output goes to ``log``."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )


def is_running(pid: int) -> bool:
    """Whether a thread of this process runs. Then the process has its files and ports."""
    return _group(pid) is not None


def members(group: int) -> list[int]:
    """Pids of the processes that run in a process group."""
    pids = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _group(pid) == group]


def _group(pid: int) -> int | None:
    """The process group; None if no thread runs.

    The state is that of the first thread (proc(5)). It may have ended before other threads.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None  # the process has ended meanwhile
    state, group, threads = after_name[0], int(after_name[2]), int(after_name[17])
    return None if state in "ZX" and threads <= 1 else group
