"""Sends requests to engines. A client's request has two legs: a request to P and a request to D."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import aiohttp

from layerpush.apps.proxy.errors import error_message
from layerpush.apps.proxy.instance import Instance
from layerpush.apps.proxy.settings import Settings
from layerpush.apps.proxy.sse import EventBuffer, error_code, has_data

Reason: TypeAlias = Literal[
    "connect", "disconnect", "timeout", "status", "error_event", "no_params", "restarted", "exhausted"
]
Headers: TypeAlias = Sequence[tuple[str, str]]
EVENT_STREAM = "text/event-stream"
POOL_IDLE_S = 4.0
"""Less than the 5 s after which vLLM's server closes an idle connection."""

_LOCAL_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of this machine, which has run out of a resource. They say nothing about the engine."""
_NOT_PASSED_BACK = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "te", "trailer", "transfer-encoding", "upgrade"}
)


class LegFailedError(Exception):
    """An engine did not answer as it should have, and the request is not at fault.

    ``reason`` is for the metric. ``answer`` is the engine's answer, if there is one.
    """

    def __init__(
        self, instance: Instance, reason: Reason, message: str, status: int = 502, answer: Whole | None = None
    ) -> None:
        super().__init__(f"{instance} {message}")
        self.instance = instance
        self.reason: Reason = reason
        self.status = status
        self.answer = answer

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
    """Server-sent events of a D that has begun to answer. Always ``close`` it: that aborts D's request."""

    def __init__(
        self, instance: Instance, response: aiohttp.ClientResponse, first: bytes, rest: EventBuffer, idle_s: float
    ) -> None:
        self.headers = passed_back(response)
        self._instance = instance
        self._response = response
        self._first = first
        self._buffer = rest
        self._idle_s = idle_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields whole events as they arrive. Raises ``LegFailedError``."""
        yield self._first
        with failures(self._instance, f"sent nothing for {self._idle_s:g} s (--stream-idle-timeout-secs)"):
            while data := await _next(self._response, self._idle_s):
                if events := self._buffer.add(data):
                    yield events
        if rest := self._buffer.rest():
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
                    if response.content_type != EVENT_STREAM or response.status != 200:
                        return await _whole(instance, response)
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
            code = error_code(events)
            if code is not None and (code >= 500 or code == 429):
                tail = buffer.rest() + await response.content.read()
                answer = Whole(response.status, passed_back(response), events + tail)
                raise LegFailedError(instance, "error_event", f"failed: {error_message(events)}", answer=answer)
            return Stream(instance, response, events, buffer, self.settings.stream_idle_timeout_s)
        raise LegFailedError(instance, "disconnect", "ended its answer before the first token")


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
    except (aiohttp.ClientError, TimeoutError) as error:
        error.__traceback__ = None  # aiohttp keeps the error, and the frames in it hold the request
        raise _failure(instance, error, when_late) from None


def _failure(instance: Instance, error: aiohttp.ClientError | TimeoutError, when_late: str) -> LegFailedError:
    match error:
        case aiohttp.ConnectionTimeoutError():
            return LegFailedError(instance, "connect", "cannot be connected to in time")
        case aiohttp.ClientConnectorError(os_error=cause) if cause.errno in _LOCAL_ERRORS:
            return LegFailedError(instance, "exhausted", f"got no connection: {cause}", 503)
        case aiohttp.ClientConnectorError(os_error=cause):
            return LegFailedError(instance, "connect", f"cannot be connected to: {cause}")
        case TimeoutError():
            return LegFailedError(instance, "timeout", when_late, 504)
        case _:
            detail = str(error) or type(error).__name__
            return LegFailedError(instance, "disconnect", f"broke the connection: {detail}")


def passed_back(response: aiohttp.ClientResponse) -> Headers:
    """The headers of an engine's answer that are meant for the client."""
    headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in response.raw_headers]
    return [(key, value) for key, value in headers if key.lower() not in _NOT_PASSED_BACK]


async def _whole(instance: Instance, response: aiohttp.ClientResponse) -> Whole:
    answer = Whole(response.status, passed_back(response), await response.read())
    if answer.status >= 500 or answer.status == 429:
        raise LegFailedError(
            instance,
            "status",
            f"answered {answer.status} to {response.url.path}: {error_message(answer.body)}",
            answer=answer,
        )
    return answer


async def _next(response: aiohttp.ClientResponse, idle_s: float) -> bytes:
    async with asyncio.timeout(idle_s):
        return await response.content.readany()
