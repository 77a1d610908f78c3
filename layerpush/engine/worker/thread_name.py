"""Names of threads as the system knows them: for ``top -H``, ``perf``, and for counting a thread's CPU time."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

WRITER = "push-writer"


def name_this_thread(name: str) -> None:
    """Name the calling thread, in at most 15 characters. Linux only; elsewhere nothing happens.

    Python before 3.14 does not set the names of its threads in the system.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
