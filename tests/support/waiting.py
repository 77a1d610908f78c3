"""Polling with deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

SECONDS = 20.0

T = TypeVar("T")


def until(
    look: Callable[[], T | None], what: str = "an answer", seconds: float = SECONDS, pause_s: float = 0.0002
) -> T:
    """The first answer that is neither ``None`` nor false. A failure names ``what`` as missing."""
    deadline = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(pause_s)
    return answer
