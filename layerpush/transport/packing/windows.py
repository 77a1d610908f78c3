"""Windows: parts of a decode rank's staging ring, each of one request. Pure; used by the writer thread only.

A window belongs to its request from the registration that offers it until no prefill rank writes into it any more: as
long as the request's blocks. It is free again when the bytes that were packed into it are scattered, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from layerpush.transport.packing.memory import PIECE_BYTES
from layerpush.transport.packing.ring import Ring


@dataclass(slots=True)
class _Window:
    offset: int
    readers: int = 0
    closed: bool = False


class Windows:
    """``size`` bytes each, as many as ``ring`` has room for. A request that gets none is written to directly."""

    def __init__(self, ring: Ring, size: int) -> None:
        self.size = size
        self._ring = ring
        self._windows: dict[str, _Window] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def open(self, request_id: str) -> int | None:
        """The offset of a window in the ring. None: there is none left, or the request has one that is in use."""
        if request_id in self._windows or not self.size:
            return None
        offset = self._ring.take(self.size, PIECE_BYTES)
        if offset is not None:
            self._windows[request_id] = _Window(offset)
        return offset

    def holds(self, request_id: str, offset: int, size: int) -> bool:
        """Whether these bytes of the ring are all in the request's window, and may be written."""
        window = self._windows.get(request_id)
        if window is None or window.closed:
            return False
        return window.offset <= offset and offset + size <= window.offset + self.size

    def read_begun(self, request_id: str) -> None:
        """Blocks are copied out of the window."""
        self._windows[request_id].readers += 1

    def read_ended(self, request_id: str) -> None:
        """The copy is over."""
        window = self._windows[request_id]
        window.readers -= 1
        self._free_if_over(request_id, window)

    def close(self, request_id: str) -> None:
        """No prefill rank writes into the request's window any more."""
        window = self._windows.get(request_id)
        if window is not None:
            window.closed = True
            self._free_if_over(request_id, window)

    def _free_if_over(self, request_id: str, window: _Window) -> None:
        if window.closed and not window.readers:
            del self._windows[request_id]
            self._ring.give(window.offset)
