"""Waiting for WRITEs."""

from __future__ import annotations

from layerpush.transport.base import Transport, WriteHandle, WriteState
from tests.support.waiting import until


def land(transport: Transport, *handles: WriteHandle) -> None:
    """Poll WRITEs in turns until all have landed, then release them."""
    in_flight = list(handles)

    def look() -> bool:
        for handle in list(in_flight):
            if transport.poll(handle) is WriteState.LANDED:
                in_flight.remove(handle)
        return not in_flight

    until(look)
    for handle in handles:
        transport.release(handle)
