"""Looks at processes of this machine."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process has not ended. Only a running one has a root directory."""
    return Path(f"/proc/{pid}/root").exists()
