"""``Transfer``: a WRITE to one decode rank. ``transport.writes`` has the rules. Writer thread only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from layerpush.core.write import WHOLE
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import Transport, WriteHandle, WriteState


@dataclass(slots=True, eq=False)
class Transfer:
    """One WRITE to one decode rank, on the wire. ``write`` is the id of the session's WRITE that it is a part of."""

    needs_polling: ClassVar[bool] = False
    """Whether polls do work between its posting and its end."""

    transport: Transport
    record: WriteRecord
    handle: WriteHandle | None
    write: int = WHOLE.id
    is_cancelled: bool = False
    """Whether it was cancelled in time: its end is no failure then."""

    @property
    def on_wire_at(self) -> float:
        """When it was posted, in seconds; the expected time while its blocks are copied."""
        return self.record.t_post

    def poll(self) -> WriteState:
        """Make progress. Raises ``TransportError`` with the reason when it has failed."""
        return self.transport.poll(self.handle)

    def cancel_unposted(self) -> None:
        """The push has ended: a WRITE that is not on the wire yet will not be posted."""

    def release(self) -> None:
        """Forget a WRITE that has ended. Raises ``TransportError`` if that must wait."""
        self.transport.release(self.handle)
