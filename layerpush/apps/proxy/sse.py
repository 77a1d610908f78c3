"""Reads server-sent events as far as a relay needs. Pure."""

from __future__ import annotations

import json

from layerpush.apps.proxy.errors import error_body

BOUNDARIES = (b"\n\n", b"\n\r\n")
_LONGEST = max(map(len, BOUNDARIES))
EVENTS_END = b"\n\ndata: [DONE]\n\n"


class EventBuffer:
    """Splits a byte stream at the ends of events. ``add`` and ``rest`` together return all bytes unchanged."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def add(self, data: bytes) -> bytes:
        """Returns all events that are complete now; empty while the first is incomplete."""
        searched = max(len(self._waiting) - _LONGEST + 1, 0)
        self._waiting += data
        end = max(self._end_of(boundary, searched) for boundary in BOUNDARIES)
        if not end:
            return b""
        whole = bytes(self._waiting[:end])
        del self._waiting[: len(whole)]
        return whole

    def _end_of(self, boundary: bytes, searched: int) -> int:
        start = self._waiting.rfind(boundary, searched)
        return start + len(boundary) if start >= 0 else 0

    def rest(self) -> bytes:
        """Returns the bytes that are left at the end of the stream."""
        left = bytes(self._waiting)
        self._waiting.clear()
        return left


def has_data(events: bytes) -> bool:
    """Whether there is more than comments, which engines send to keep a connection alive."""
    return events.startswith(b"data") or b"\ndata" in events


def error_code(events: bytes) -> int | None:
    """The HTTP status in the first event that has data, if that event is an error; 500 if it names none."""
    for line in events.splitlines():
        if not line.startswith(b"data:"):
            continue
        if not line.removeprefix(b"data:").lstrip().startswith(b'{"error"'):
            return None
        try:
            code = json.loads(line.removeprefix(b"data:"))["error"]["code"]
        except (ValueError, KeyError, TypeError):
            return 500
        return code if isinstance(code, int) and 400 <= code < 600 else 500
    return None


def error_event(status: int, message: str) -> bytes:
    """An error event and the end of the stream, in vLLM's format."""
    return b"data: " + error_body(status, message) + EVENTS_END
