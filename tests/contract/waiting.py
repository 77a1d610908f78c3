"""Polling with deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from layerpush.transport.base import Transport, WriteHandle, WriteState

SECONDS = 20.0

T = TypeVar("T")


def until(look: Callable[[], T | None], seconds: float = SECONDS) -> T:
    """The first answer that is neither ``None`` nor false."""
    deadline = time.monotonic() + seconds
    while not (answer := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing within {seconds} s")
        time.sleep(0.0002)
    return answer


def land(transport: Transport, *handles: WriteHandle) -> None:
    """Poll WRITEs in turns until all have landed, then release them."""
    in_flight = list(handles)

    def look() -> bool:
        for handle in list(in_flight):
            state = transport.poll(handle)
            assert state is not WriteState.FAILED
            if state is WriteState.LANDED:
                in_flight.remove(handle)
        return not in_flight

    until(look)
    for handle in handles:
        transport.release(handle)
