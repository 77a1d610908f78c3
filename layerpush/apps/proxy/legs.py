"""Sends requests to engines. A client's request has two legs: a request to P and a request to D."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import aiohttp

from layerpush.apps.proxy.errors import error_message, shortened
from layerpush.apps.proxy.instance import Instance
from layerpush.apps.proxy.settings import Settings
from layerpush.apps.proxy.sse import EventBuffer, EventTooLargeError, failure_in, has_data

Reason: TypeAlias = Literal[
    "connect", "disconnect", "timeout", "status", "error_event", "too_large", "no_params", "restarted", "exhausted"
]
Headers: TypeAlias = Sequence[tuple[str, str]]
EVENT_STREAM = "text/event-stream"
MAX_ANSWER_BYTES = 16 << 20
"""The longest answer that the proxy needs in one piece: P's, an error, a list of models."""
HELD_BYTES = 1 << 20
"""D's answer in one piece is passed on as it comes from this size on."""
POOL_IDLE_S = 2.0
"""Well below the 5 s after which vLLM's server closes an idle connection: a busy machine adds to these seconds."""

_LOCAL_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of this machine, which has run out of a resource. They say nothing about the engine."""
_STATUSES = (429, 500, 501, 502, 503, 504)
"""Statuses of engines that a client gets as well. In the place of others it gets 502."""
_OF_THE_CONNECTION = frozenset(
    {"connection", "content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
_OF_THE_ENGINE = frozenset({"alt-svc", "date", "location", "server", "set-cookie", "strict-transport-security", "via"})
"""Headers about the engine's own origin, which clients must not see and cannot reach."""


class LegFailedError(Exception):
    """An engine did not answer as it should have, and the request is not at fault.

    Its text is for the log. ``public`` is for clients: neither an engine's address nor its own text.
    ``reason`` is for the metric, ``status`` for the client.
    """

    def __init__(self, instance: Instance, reason: Reason, message: str, status: int = 502, detail: str = "") -> None:
        """``message`` follows the engine's name in both texts, ``detail`` only in the log's."""
        super().__init__(f"{instance} {message}{detail and ': ' + detail}")
        self.instance = instance
        self.reason: Reason = reason
        self.status = status if status in _STATUSES else 502
        self.public = f"the {instance.role} engine {message}{detail and '; the log of the proxy says more'}"

    @property
    def gone(self) -> bool:
        """Nobody listens at the engine's URL."""
        return self.reason == "connect"

    @property
    def exhausted(self) -> bool:
        """This process or machine can open no more connections."""
        return self.reason == "exhausted"

    @property
    def refused(self) -> bool:
        """The engine answered with an error, and would probably do so again."""
        return self.reason in ("status", "error_event")

    @property
    def broken(self) -> bool:
        """The connection ended early. The engine may have died, or may have closed an idle connection."""
        return self.reason == "disconnect"


@dataclass(frozen=True)
class Whole:
    """An answer that has been read to its end."""

    status: int
    headers: Headers
    body: bytes

    @property
    def refuses(self) -> bool:
        """Whether the engine rejects the request itself."""
        return 400 <= self.status < 500 and self.status != 429


class Stream:
    """An answer of D that has begun. Always ``close`` it: that aborts D's request."""

    def __init__(
        self,
        instance: Instance,
        response: aiohttp.ClientResponse,
        first: bytes,
        events: EventBuffer | None,
        idle_s: float,
    ) -> None:
        """``events``: the bytes behind ``first``, of server-sent events. None for an answer of another kind."""
        self.headers = passed_back(response)
        self._instance = instance
        self._response = response
        self._first = first
        self._buffer = events
        self._idle_s = idle_s

    @property
    def has_events(self) -> bool:
        """Whether the answer consists of server-sent events."""
        return self._buffer is not None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields whole events as they arrive, or bytes if there are no events. Raises ``LegFailedError``."""
        async for data in self._data():
            found = failure_in(data) if self.has_events else None
            if found is None:
                yield data
                continue
            start, code = found
            if start:
                yield data[:start]
            raise _failed_event(self._instance, data[start:], code)

    async def _data(self) -> AsyncIterator[bytes]:
        yield self._first
        with failures(self._instance, f"sent nothing for {self._idle_s:g} s (--stream-idle-timeout-secs)"):
            while data := await _next(self._response, self._idle_s):
                if self._buffer is not None:
                    data = self._buffer.add(data)
                if data:
                    yield data
            if self._buffer is not None and (rest := self._buffer.rest()):
                yield rest

    def close(self) -> None:
        self._response.close()


Comments: TypeAlias = Callable[[Headers, bytes], Awaitable[None]]
"""Takes the comments that D sends to keep its connection alive before its first token."""


class Engines:
    """Client of the engines' API servers, over one HTTP session."""

    def __init__(self, session: aiohttp.ClientSession, settings: Settings) -> None:
        self.settings = settings
        self.own_headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        """Headers of the proxy's own requests."""
        self._session = session

    async def ask(self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]) -> Whole:
        """POST, and read the whole answer. Raises ``LegFailedError``, also for status 429 and from 500 on.

        P's leg uses it, too, so its deadline is that of D's first token.
        """
        timeout_s = self.settings.first_token_timeout_s
        with failures(instance, f"did not answer within {timeout_s:g} s"):
            async with asyncio.timeout(timeout_s), self._post(instance, path, body, headers) as response:
                return await _whole(instance, response)

    async def decode(
        self,
        instance: Instance,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        comments: Comments,
        *,
        streams: bool,
    ) -> Whole | Stream:
        """D's leg. Returns a whole answer, or an event stream after its first token. Raises ``LegFailedError``."""
        limit_s = self.settings.first_token_timeout_s
        response: aiohttp.ClientResponse | None = None
        with failures(instance, f"sent no token within {limit_s:g} s (--first-token-timeout-secs)"):
            try:
                async with asyncio.timeout(limit_s if streams else None):
                    response = await self._post(instance, path, body, headers)
                    if response.status != 200:
                        return await _whole(instance, response)
                    if response.content_type != EVENT_STREAM:
                        return await self._begin_whole(instance, response)
                    return await self._begin(instance, response, comments)
            except BaseException:  # close it after any error, so that the engine aborts the request
                if response is not None:
                    response.close()
                raise

    async def get(
        self, instance: Instance, path: str, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Whole:
        """GET, and read the whole answer. Raises ``LegFailedError``, also for status 429 and from 500 on."""
        headers = self.own_headers if headers is None else headers
        with failures(instance, f"did not answer {path} within {timeout_s:g} s"):
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(instance.url + path, headers=headers, allow_redirects=False) as response,
            ):
                return await _whole(instance, response)

    def _post(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.client._RequestContextManager:
        return self._session.post(
            instance.url + path,
            data=body,
            headers={**headers, "Content-Type": "application/json"},
            allow_redirects=False,
        )

    async def _begin(self, instance: Instance, response: aiohttp.ClientResponse, comments: Comments) -> Stream:
        buffer = EventBuffer()
        while data := await response.content.readany():
            events = buffer.add(data)
            if not events:
                continue
            if not has_data(events):
                await comments(passed_back(response), events)
                continue
            found = failure_in(events)
            if found is not None and not has_data(events[: found[0]]):
                raise _failed_event(instance, events, found[1])
            return Stream(instance, response, events, buffer, self.settings.stream_idle_timeout_s)
        raise LegFailedError(instance, "disconnect", "ended its answer before the first token")

    async def _begin_whole(self, instance: Instance, response: aiohttp.ClientResponse) -> Whole | Stream:
        """Read an answer in one piece; a large one only as far as ``HELD_BYTES``."""
        body, ended = await _read(response, HELD_BYTES)
        if ended:
            return Whole(response.status, passed_back(response), body)
        return Stream(instance, response, body, None, self.settings.stream_idle_timeout_s)


@contextlib.asynccontextmanager
async def http_session(settings: Settings) -> AsyncIterator[aiohttp.ClientSession]:
    """The one session. Its connections have no limit: :class:`~layerpush.apps.proxy.gate.Gate` limits the requests."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        yield session


@contextlib.contextmanager
def failures(instance: Instance, when_late: str) -> Iterator[None]:
    """Turn errors of a connection into ``LegFailedError``. ``when_late`` is the message after a time-out."""
    try:
        yield
    except EventTooLargeError as error:
        raise LegFailedError(instance, "too_large", str(error)) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        error.__traceback__ = None  # aiohttp keeps the error, and the frames in it hold the request
        raise _failure(instance, error, when_late) from None


def _failure(instance: Instance, error: aiohttp.ClientError | TimeoutError, when_late: str) -> LegFailedError:
    match error:
        case aiohttp.ConnectionTimeoutError():
            return LegFailedError(instance, "connect", "cannot be connected to in time")
        case aiohttp.ClientConnectorError(os_error=cause) if cause.errno in _LOCAL_ERRORS:
            return LegFailedError(instance, "exhausted", f"got no connection: {os.strerror(cause.errno)}", 503)
        case aiohttp.ClientConnectorError(os_error=cause):
            return LegFailedError(instance, "connect", "cannot be connected to", detail=shortened(str(cause)))
        case TimeoutError():
            return LegFailedError(instance, "timeout", when_late, 504)
        case _:
            detail = shortened(str(error)) or type(error).__name__
            return LegFailedError(instance, "disconnect", "broke the connection", detail=detail)


def passed_back(response: aiohttp.ClientResponse) -> Headers:
    """The headers of an engine's answer that are meant for the client."""
    headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in response.raw_headers]
    named = {name.strip() for key, value in headers if key.lower() == "connection" for name in value.lower().split(",")}
    dropped = _OF_THE_CONNECTION | _OF_THE_ENGINE | named
    return [(key, value) for key, value in headers if key.lower() not in dropped and not _is_of_a_proxy(key)]


def _is_of_a_proxy(key: str) -> bool:
    return key.lower().startswith("proxy-")


async def _whole(instance: Instance, response: aiohttp.ClientResponse) -> Whole:
    """Read an answer to its end. It is 200, or refuses the request."""
    body, ended = await _read(response, MAX_ANSWER_BYTES)
    if not ended:
        raise LegFailedError(instance, "too_large", f"sent an answer of more than {MAX_ANSWER_BYTES} bytes")
    answer = Whole(response.status, passed_back(response), body)
    if answer.status != 200 and not answer.refuses:
        raise LegFailedError(
            instance,
            "status",
            f"answered {answer.status} to {response.url.path}",
            answer.status,
            error_message(answer.body),
        )
    return answer


async def _read(response: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
    """Read to the end, or until there are more than ``limit`` bytes. Returns the bytes, and whether it is the end."""
    parts = bytearray()
    while data := await response.content.readany():
        parts += data
        if len(parts) > limit:
            return bytes(parts), False
    return bytes(parts), True


def _failed_event(instance: Instance, events: bytes, code: int) -> LegFailedError:
    return LegFailedError(instance, "error_event", f"failed with code {code}", code, error_message(events))


async def _next(response: aiohttp.ClientResponse, idle_s: float) -> bytes:
    async with asyncio.timeout(idle_s):
        return await response.content.readany()
