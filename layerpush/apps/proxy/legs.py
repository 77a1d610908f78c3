"""Sends requests to engines. A client's request has two legs: a request to P and a request to D."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass

import aiohttp

from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.errors import shortened

EVENT_STREAM = "text/event-stream"
MAX_ANSWER_BYTES = 16 << 20
"""The longest answer that the proxy needs in one piece: P's, an error, a list of models, D's first event."""
HELD_BYTES = 1 << 20
"""D's answer in one piece is passed on as it comes from this size on."""
CONNECT_S = 5.0
POOL_IDLE_S = 2.0
"""Well below the 5 s after which vLLM's server closes an idle connection: a busy machine adds to these seconds."""
PASSED_BACK = ("content-type", "cache-control", "x-accel-buffering", "x-request-id")
"""The headers of an engine's answer that the client gets. Others are about the connection, or the engine's origin."""

_STATUSES = (429, 500, 501, 502, 503, 504)
"""Statuses of engines that a client gets as well. In the place of others it gets 502."""
_LIMIT = "(--engine-timeout-secs)"
_EVENT_END = re.compile(rb"\n\r?\n")


class LegFailedError(Exception):
    """An engine did not answer as it should have, and the request is not at fault.

    Its text is for the log. ``public`` is for clients: neither an engine's address nor its own text. ``status`` is for
    the client, too.
    """

    def __init__(
        self,
        engine: Engine,
        message: str,
        status: int = 502,
        detail: str = "",
        *,
        is_gone: bool = False,
        is_lost: bool = False,
        suspects: Collection[Engine] | None = None,
    ) -> None:
        """``message`` follows the engine's name in both texts, ``detail`` only in the log's.

        ``is_gone``: nobody listens at the engine's URL. ``is_lost``: the connection ended early, or the engine is
        another process now; it may answer another attempt. ``suspects``: engines that may be the reason.
        """
        super().__init__(f"{engine} {message}{detail and ': ' + detail}")
        self.engine = engine
        self.status = status if status in _STATUSES else 502
        self.public = f"the {engine.role} engine {message}{detail and '; the log of the proxy says more'}"
        self.suspects: Collection[Engine] = (engine,) if suspects is None else suspects
        self.is_gone = is_gone
        self.is_lost = is_lost or is_gone


@dataclass(frozen=True)
class Whole:
    """An answer that has been read to its end. Its status is 200, or it refuses the request itself."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Stream:
    """An answer of D that has begun. Always ``close`` it: that aborts D's request."""

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse, first: bytes, idle_s: float) -> None:
        self.headers = _passed_back(response)
        self._engine = engine
        self._response = response
        self._first = first
        self._idle_s = idle_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields the bytes as they arrive. Raises ``LegFailedError``."""
        yield self._first
        with _failures(self._engine, f"sent nothing for {self._idle_s:g} s {_LIMIT}"):
            while data := await self._next():
                yield data

    async def _next(self) -> bytes:
        async with asyncio.timeout(self._idle_s):
            return await self._response.content.readany()

    def close(self) -> None:
        self._response.close()


class Engines:
    """Client of the engines' API servers, over one HTTP session. The proxy's own limit bounds its connections."""

    def __init__(self, session: aiohttp.ClientSession, limit_s: float) -> None:
        """``limit_s``: the longest wait for an answer, and the longest pause in a stream."""
        self._session = session
        self._limit_s = limit_s

    async def ask(self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]) -> Whole:
        """POST, and read the whole answer. Raises ``LegFailedError``, also for status 429 and from 500 on."""
        with _failures(engine, f"did not answer within {self._limit_s:g} s {_LIMIT}"):
            async with asyncio.timeout(self._limit_s), self._post(engine, path, body, headers) as response:
                return await _whole(engine, response)

    async def decode(
        self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str], *, streams: bool
    ) -> Whole | Stream:
        """D's leg. Returns a whole answer, or a stream after its first event. Raises ``LegFailedError``.

        An answer that does not stream may take as long as the whole request.
        """
        response: aiohttp.ClientResponse | None = None
        with _failures(engine, f"sent no token within {self._limit_s:g} s {_LIMIT}"):
            try:
                async with asyncio.timeout(self._limit_s if streams else None):
                    response = await self._post(engine, path, body, headers)
                    return await (_whole if response.status != 200 else self._begin)(engine, response)
            except BaseException:  # close it after any error, so that the engine aborts the request
                if response is not None:
                    response.close()
                raise

    async def models(self, engine: Engine, headers: Mapping[str, str]) -> Whole:
        """The engine's list of models. Raises ``LegFailedError``, also for status 429 and from 500 on."""
        with _failures(engine, f"did not answer within {CONNECT_S:g} s"):
            async with (
                asyncio.timeout(CONNECT_S),
                self._session.get(f"{engine.url}/v1/models", headers=headers, allow_redirects=False) as response,
            ):
                return await _whole(engine, response)

    def _post(
        self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.client._RequestContextManager:
        headers = {**headers, "Content-Type": "application/json"}
        return self._session.post(engine.url + path, data=body, headers=headers, allow_redirects=False)

    async def _begin(self, engine: Engine, response: aiohttp.ClientResponse) -> Whole | Stream:
        if response.content_type != EVENT_STREAM:
            body, is_end = await _read(response, HELD_BYTES)
            if is_end:
                return Whole(200, _passed_back(response), body)
            return Stream(engine, response, body, self._limit_s)
        first = bytearray()
        while data := await response.content.readany():
            first += data
            end = _EVENT_END.search(first, max(0, len(first) - len(data) - 2))
            if end is not None and (first.startswith(b"data:") or b"\ndata:" in first):  # comments come before data
                _check_first(engine, bytes(first))
                return Stream(engine, response, bytes(first), self._limit_s)
            if len(first) > MAX_ANSWER_BYTES:
                raise LegFailedError(engine, f"sent an event of more than {MAX_ANSWER_BYTES} bytes")
        raise LegFailedError(engine, "ended its answer before the first token", is_lost=True)


def http_session() -> aiohttp.ClientSession:
    """The one session. It keeps no cookies, and asks for no compression."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )


@contextlib.contextmanager
def _failures(engine: Engine, when_late: str) -> Iterator[None]:
    """Turn errors of a connection into ``LegFailedError``. ``when_late`` is the message after a time-out."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        error.__traceback__ = None  # aiohttp keeps the error, and the frames in it hold the request
        raise _failure(engine, error, when_late) from None


def _failure(engine: Engine, error: aiohttp.ClientError | TimeoutError, when_late: str) -> LegFailedError:
    match error:
        case aiohttp.ConnectionTimeoutError() | aiohttp.ClientConnectorError():
            return LegFailedError(engine, "cannot be connected to", 503, shortened(str(error)), is_gone=True)
        case TimeoutError():
            return LegFailedError(engine, when_late, 504)
        case _:
            detail = shortened(str(error) or type(error).__name__)
            return LegFailedError(engine, "broke the connection", detail=detail, is_lost=True)


def _passed_back(response: aiohttp.ClientResponse) -> dict[str, str]:
    headers = {key: response.headers.get(key, "") for key in PASSED_BACK}
    return {key: value for key, value in headers.items() if value and value.isprintable()}


async def _whole(engine: Engine, response: aiohttp.ClientResponse) -> Whole:
    body, is_end = await _read(response, MAX_ANSWER_BYTES)
    status = response.status
    if not is_end:
        raise LegFailedError(engine, f"sent an answer of more than {MAX_ANSWER_BYTES} bytes")
    if status == 200 or (400 <= status < 500 and status != 429):
        return Whole(status, _passed_back(response), body)
    message = f"answered {status} to {response.url.path}"
    raise LegFailedError(engine, message, status, shortened(body))


async def _read(response: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
    """Read to the end, or until there are more than ``limit`` bytes. Returns the bytes, and whether it is the end."""
    parts = bytearray()
    while data := await response.content.readany():
        parts += data
        if len(parts) > limit:
            return bytes(parts), False
    return bytes(parts), True


def _check_first(engine: Engine, events: bytes) -> None:
    """Raises ``LegFailedError`` if a stream begins with an error with status 429, or from 500 on: the engine failed.
    Others refuse the request.
    """
    data = next(line for line in events.splitlines() if line.startswith(b"data:"))
    try:
        code = int(json.loads(data[5:])["error"]["code"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    if code == 429 or code >= 500:
        raise LegFailedError(engine, f"failed with code {code}", code, shortened(data))
