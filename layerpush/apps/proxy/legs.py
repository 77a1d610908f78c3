"""Sends requests to engines. A client's request has two legs: a request to P and a request to D."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass

import aiohttp

from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.errors import shortened
from layerpush.telemetry.peer_errors import PeerErrors

logger = logging.getLogger("layerpush.proxy")

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
_EVENT_END = re.compile(rb"\n\r?\n")


class LegFailedError(Exception):
    """An engine did not answer as it should have, and the request is not at fault.

    Its text is for the log. ``public`` is for clients: neither an engine's address nor its own text. ``status`` is for
    the client as well. ``suspects`` are the engines that may be the reason. ``kind`` is the text without its detail.
    """

    def __init__(
        self, engine: Engine, message: str, status: int = 502, detail: str = "", *, is_lost: bool = False
    ) -> None:
        """``message`` follows the engine's name in both texts, ``detail`` only in the log's.

        ``is_lost``: there is no connection, or it ended early. The engine may answer another attempt.
        """
        self.kind = f"{engine} {message}"
        super().__init__(f"{self.kind}{detail and ': ' + detail}")
        self.status = status if status in _STATUSES else 502
        self.public = f"the {engine.role} engine {message}{detail and '; the log of the proxy says more'}"
        self.suspects: Collection[Engine] = (engine,)
        self.is_lost = is_lost


@dataclass(frozen=True)
class Whole:
    """An answer that has been read to its end. Its status is 200, or it refuses the request itself."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Stream:
    """An answer of D that has begun. Always ``close`` it: that aborts D's request."""

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse, first: bytes) -> None:
        self.headers = _passed_back(response)
        self._engine = engine
        self._response = response
        self._first = first

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields the bytes as they arrive. Raises ``LegFailedError``."""
        yield self._first
        with _failures(self._engine):
            async for data in self._response.content.iter_any():
                yield data

    def close(self) -> None:
        self._response.close()


class Engines:
    """Client of the engines' API servers, over one HTTP session. The proxy's own limit bounds its connections."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.peer_errors = PeerErrors(logger)
        """Of engines. A client can cause them at any rate."""

    async def ask(self, engine: Engine, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Whole:
        """POST, or GET without ``body``, and read the whole answer.

        Raises ``LegFailedError``, also for status 429 and from 500 on.
        """
        send = self._session.get if body is None else self._session.post
        with _failures(engine):
            async with send(engine.url + path, data=body, headers=headers, allow_redirects=False) as response:
                return await _whole(engine, response)

    async def decode(
        self, engine: Engine, path: str, headers: Mapping[str, str], body: bytes, *, streams: bool
    ) -> Whole | Stream:
        """D's leg. Returns a whole answer, or a stream after its first event. Raises ``LegFailedError``.

        An answer that does not stream may take as long as the whole request.
        """
        timeout = self._session.timeout if streams else aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        with _failures(engine):
            response = await self._session.post(
                engine.url + path, data=body, headers=headers, allow_redirects=False, timeout=timeout
            )
            try:
                return await (_begin if response.status == 200 else _whole)(engine, response)
            except BaseException:  # close it after any error, so that the engine aborts the request
                response.close()
                raise


def http_session(silence_s: float) -> aiohttp.ClientSession:
    """The one session. It keeps no cookies, and asks for no compression.

    ``silence_s``: the longest pause of an engine.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s),
        headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def end(*legs: asyncio.Task[None] | asyncio.Task[Whole] | asyncio.Task[Whole | Stream]) -> None:
    """Cancel the legs, and close their streams."""
    for leg in legs:
        leg.cancel()
    for ended in await asyncio.gather(*legs, return_exceptions=True):
        if isinstance(ended, Stream):
            ended.close()


@contextlib.contextmanager
def _failures(engine: Engine) -> Iterator[None]:
    """Turn errors of a connection into ``LegFailedError``. An engine that cannot be connected to is gone."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        error.__traceback__ = None  # aiohttp keeps the error, and the frames in it hold the request
        detail = shortened(str(error) or type(error).__name__)
        match error:
            case aiohttp.ConnectionTimeoutError() | aiohttp.ClientConnectorError():
                engine.gone(asyncio.get_running_loop().time())
                raise LegFailedError(engine, "cannot be connected to", 503, detail, is_lost=True) from None
            case TimeoutError():
                raise LegFailedError(engine, "was silent for longer than --engine-timeout-secs", 504) from None
            case _:
                raise LegFailedError(engine, "broke the connection", detail=detail, is_lost=True) from None


def _passed_back(response: aiohttp.ClientResponse) -> dict[str, str]:
    headers = {key: response.headers.get(key, "") for key in PASSED_BACK}
    return {key: value for key, value in headers.items() if value and value.isprintable()}


async def _whole(engine: Engine, response: aiohttp.ClientResponse) -> Whole:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_ANSWER_BYTES:
            raise LegFailedError(engine, f"sent an answer of more than {MAX_ANSWER_BYTES} bytes")
    status = response.status
    if status == 200 or (400 <= status < 500 and status != 429):
        return Whole(status, _passed_back(response), bytes(body))
    raise LegFailedError(engine, f"answered {status} to {response.url.path}", status, shortened(bytes(body)))


async def _begin(engine: Engine, response: aiohttp.ClientResponse) -> Whole | Stream:
    """An answer with status 200: whole if it is short and no stream of events, else up to its first event."""
    has_events = response.content_type == EVENT_STREAM
    first = bytearray()
    async for data in response.content.iter_any():
        first += data
        if not has_events and len(first) > HELD_BYTES:
            return Stream(engine, response, bytes(first))
        end_of_event = has_events and _EVENT_END.search(first, max(0, len(first) - len(data) - 2))
        if end_of_event and (first.startswith(b"data:") or b"\ndata:" in first):  # comments come before data
            _check_first(engine, bytes(first))
            return Stream(engine, response, bytes(first))
        if len(first) > MAX_ANSWER_BYTES:
            raise LegFailedError(engine, f"sent an event of more than {MAX_ANSWER_BYTES} bytes")
    if has_events:
        raise LegFailedError(engine, "ended its answer before the first token", is_lost=True)
    return Whole(200, _passed_back(response), bytes(first))


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
