"""Names of threads as the system knows them: for ``top -H``, ``perf``, and for counting a thread's CPU time."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

WRITER = "push-writer"


def name_this_thread(name: str) -> None:
    """Python before 3.14 keeps names to itself. The kernel takes 15 characters; elsewhere than on Linux none."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
