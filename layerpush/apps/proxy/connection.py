"""A client's connection. It bounds the head of each request: the request line and the headers."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from layerpush.apps.proxy.errors import error_body

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 10.0


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with three limits that it lacks. Used by the event loop's thread only.

    It is the protocol over httptools: h11 waits for the body of a request with two framings, which must be refused.

    - A head has at most ``MAX_HEAD_BYTES``. The parser concatenates the parts of an unfinished line again and again,
      so it gets no more bytes than these without a whole head or a part of a body in return. That also bounds the
      extensions and trailers of a chunked body. A head that arrives together with the end of the request before it
      may be longer: the connection counts it from the next bytes that arrive.
    - A head arrives within ``HEAD_TIMEOUT_S``, counted from the connection's beginning, or from the head's first byte.
      While an earlier request on the connection is being answered, this deadline does not end.
    - A head has one ``Host``, and no transfer coding but ``chunked``.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unparsed = 0
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None
        self._problem: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        left = memoryview(data)
        while left and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._unparsed
            if room <= 0:
                self._refuse(431, f"the request line and the headers have more than {MAX_HEAD_BYTES} bytes")
                return
            part, left = left[:room], left[room:]
            self._unparsed += len(part)
            super().data_received(part)  # type: ignore[arg-type]  # the parser takes any buffer
        if self._in_head and self._unparsed and self._deadline is None:
            self._start_deadline()

    def on_message_begin(self) -> None:
        self._unparsed = self._unparsed or 1  # it may have come with the end of the request before it
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_deadline()
        self._problem = self._problem_of_head()
        if self._problem is not None:
            raise ValueError(self._problem)  # the parser stops, and ``send_400_response`` is called
        self._unparsed = 0
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, self._problem or msg)

    def _problem_of_head(self) -> str | None:
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            return f"the request has {hosts} Host headers; it must have one"
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            return "Transfer-Encoding must be chunked, and nothing else"
        return None

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self._earlier_is_answered:
            self._start_deadline()
        elif self._unparsed:
            self._refuse(408, f"the request line and the headers took more than {HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()

    @property
    def _earlier_is_answered(self) -> bool:
        """Whether the answer to an earlier request than the one that arrives is under way, or still to come."""
        if self._in_head:
            return self.cycle is not None and not self.cycle.response_complete
        return bool(self.pipeline)

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection. The client gets an error, unless that would stand in the place of another answer."""
        is_answered = not self._in_head and self.cycle.response_started
        if not (self.transport.is_closing() or self._earlier_is_answered or is_answered):
            body = error_body(status, message)
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
