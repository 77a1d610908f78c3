"""Sends the answer of a request to its client."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Send

from layerpush.apps.proxy.errors import error_body
from layerpush.apps.proxy.legs import Headers, Whole
from layerpush.apps.proxy.sse import EVENTS_END, error_event

ERROR_TIMEOUT_S = 5.0


class Client:
    """Sends one answer. It waits while the client reads more slowly than D writes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streams = False
        self._ended = False
        self.started = False

    async def start(self, status: int, headers: Headers, length: int | None = None, *, has_events: bool = True) -> None:
        """Send status and headers, unless they are sent already. ``has_events``: an error may become an event."""
        if self.started:
            return
        self.started = True
        self._streams = length is None and has_events
        raw = [(key.lower().encode("latin-1"), value.encode("latin-1")) for key, value in headers]
        if length is not None:
            raw.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, data: bytes) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def comment(self, headers: Headers, data: bytes) -> None:
        """Send a comment, which keeps a stream alive before its first token. Another attempt is still possible."""
        await self.start(200, headers)
        await self.send(data)

    async def end(self) -> None:
        """End the body."""
        self._ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, answer: Whole) -> None:
        """Send an answer in one piece; in a stream that has begun, an error becomes an event."""
        body = answer.body
        if self.started and answer.status != 200:
            body = b"".join((b"data: ", body.replace(b"\n", b" "), EVENTS_END))
        await self.start(answer.status, answer.headers, len(body))
        await self.send(body)
        await self.end()

    async def fail(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        """Send the proxy's own error: as a status or, in a stream that has begun, as an event. Not after the end.

        It gives up after ``ERROR_TIMEOUT_S`` if the client does not read.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ERROR_TIMEOUT_S):
                await self._fail(status, message, retry_after_s)

    async def _fail(self, status: int, message: str, retry_after_s: int | None) -> None:
        if self._ended:
            return
        if self.started:
            if self._streams:
                await self.send(error_event(status, message))
                await self.end()
            return
        headers = [("content-type", "application/json")]
        if retry_after_s is not None:
            headers.append(("retry-after", str(retry_after_s)))
        await self.whole(Whole(status, headers, error_body(status, message)))
