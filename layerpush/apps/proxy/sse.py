"""Reads server-sent events as far as a relay needs. Pure."""

from __future__ import annotations

import json

from layerpush.apps.proxy.errors import error_body

BOUNDARIES = (b"\n\n", b"\n\r\n")
_LONGEST = max(map(len, BOUNDARIES))
MAX_EVENT_BYTES = 16 << 20
_ERROR = b'{"error"'
EVENTS_END = b"\n\ndata: [DONE]\n\n"


class EventTooLargeError(Exception):
    """An event has more than ``MAX_EVENT_BYTES``. The message says what the engine did."""


class EventBuffer:
    """Splits a byte stream at the ends of events. ``add`` and ``rest`` together return all bytes unchanged."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def add(self, data: bytes) -> bytes:
        """Returns all events that are complete now; empty while the first is incomplete.

        Raises ``EventTooLargeError``.
        """
        searched = max(len(self._waiting) - _LONGEST + 1, 0)
        self._waiting += data
        end = max(self._end_of(boundary, searched) for boundary in BOUNDARIES)
        if not end:
            self._check()
            return b""
        whole = bytes(self._waiting[:end])
        del self._waiting[: len(whole)]
        return whole

    def _check(self) -> None:
        if len(self._waiting) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"sent an event of more than {MAX_EVENT_BYTES} bytes")

    def _end_of(self, boundary: bytes, searched: int) -> int:
        start = self._waiting.rfind(boundary, searched)
        return start + len(boundary) if start >= 0 else 0

    def rest(self) -> bytes:
        """Returns the bytes that are left at the end of the stream. Raises ``EventTooLargeError``."""
        self._check()
        left = bytes(self._waiting)
        self._waiting.clear()
        return left


def has_data(events: bytes) -> bool:
    """Whether there is more than comments, which engines send to keep a connection alive."""
    return events.startswith(b"data") or b"\ndata" in events


def failure_in(events: bytes) -> tuple[int, int] | None:
    """Where the first event begins that reports a failure of the engine, and its code; None if there is none.

    A refusal of the request (4xx) is no failure, but 429 is. An error without a code counts as 500.
    """
    if _ERROR not in events:
        return None
    start = 0
    for line in events.splitlines(keepends=True):
        if line.startswith(b"data:") and line.removeprefix(b"data:").lstrip().startswith(_ERROR):
            code = _code(line.removeprefix(b"data:"))
            if code >= 500 or code == 429:
                return start, code
        start += len(line)
    return None


def _code(error: bytes) -> int:
    try:
        code = json.loads(error)["error"]["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def error_event(status: int, message: str) -> bytes:
    """An error event and the end of the stream, in vLLM's format."""
    return b"data: " + error_body(status, message) + EVENTS_END
