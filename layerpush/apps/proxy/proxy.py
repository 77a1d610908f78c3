"""Serves clients' requests, each from the first byte of its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace

from aiohttp import web

from layerpush.apps.http_server import ClientConnections
from layerpush.apps.proxy.attempt import Answer, Attempt
from layerpush.apps.proxy.body import RequestBody
from layerpush.apps.proxy.conversations import SESSION, Conversations, Session
from layerpush.apps.proxy.engines import Engine, Pool
from layerpush.apps.proxy.errors import ProxyError
from layerpush.apps.proxy.legs import Engines, LegFailedError, Stream, Whole, end, http_session
from layerpush.apps.proxy.settings import Settings

logger = logging.getLogger("layerpush.proxy")

SPARE_CONNECTIONS = 256
"""So many more connections than requests may be open: they are idle, or their head arrives."""
MODELS_S = 10.0
"""Deadline for a list of models."""
UPLOAD_S = 60.0
"""Deadline for the arrival of a body."""
RETRIES = 2
"""Further attempts with a request before its first token."""
PASSED_ON = ("authorization", "traceparent", "tracestate", "baggage", "user-agent")
"""Headers of a client that are passed on to engines. Only the proxy sets X-Request-Id and X-data-parallel-rank."""


class Proxy:
    """The server's handlers, and what they share. They serve while it is :meth:`running`."""

    engines: Engines

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.prefill = Pool("prefill", settings.prefill)
        self.decode = Pool("decode", settings.decode)
        self.questions: dict[Engine, asyncio.Task[None]] = {}
        self.requests = 0
        self.retries = 0
        self.body_bytes = 0
        self.conversations = Conversations()
        self.connections = ClientConnections(logger, settings.max_concurrent_requests + SPARE_CONNECTIONS)

    async def running(self, _: web.Application) -> AsyncIterator[None]:
        """Have an HTTP session, from the first step of this generator to its second one. Then end questions to P."""
        async with http_session(self.settings.engine_timeout_secs) as session:
            self.engines = Engines(session)
            yield
            await end(*self.questions.values())

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a completion. Its task is cancelled if the client leaves.

        Returns the answer, as far as it is not sent yet. Raises ``ProxyError`` if there is none.
        """
        limit_s = self.settings.request_timeout_secs
        stream = web.StreamResponse()
        with self._counted(request):
            try:
                async with asyncio.timeout(limit_s):
                    async with self._body(request) as body:
                        session = _session(request, body)
                        answer = await self._ask(body, _passed_on(request), session)
                    return await self._pass_on(request, stream, answer, session)
            except LegFailedError as failure:
                self._log(failure)
                return _break_off(request, stream, failure.status, failure.public)
            except TimeoutError:
                return _break_off(
                    request, stream, 504, f"the request took more than {limit_s:g} s (--request-timeout-secs)"
                )

    async def models(self, request: web.Request) -> web.Response:
        """The list of the first D that answers. All of them together have ``MODELS_S``."""
        with self._counted(request), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MODELS_S):
                for decode in self.decode.engines:
                    with contextlib.suppress(LegFailedError):
                        return _response(await self.engines.ask(decode, request.path, _passed_on(request)))
        raise ProxyError(503, "no decode engine gives its list of models")

    @contextlib.contextmanager
    def _counted(self, request: web.Request) -> Iterator[None]:
        """The request takes a place while the block runs. Raises ``ProxyError`` if none is free."""
        if self.requests >= self.settings.max_concurrent_requests:
            message = f"{self.requests} requests are under way (--max-concurrent-requests); try again later"
            raise ProxyError(429, message)
        self.requests += 1
        try:
            with self.connections.working(request):
                yield
        finally:
            self.requests -= 1

    def _log(self, failure: LegFailedError) -> None:
        self.engines.peer_errors.count(failure.kind, str(failure), asyncio.get_running_loop().time())

    async def health(self, _: web.Request) -> web.Response:
        """The proxy lives. The engines are not checked."""
        return web.json_response({"requests": self.requests, "retries": self.retries})

    @contextlib.asynccontextmanager
    async def _body(self, request: web.Request) -> AsyncIterator[RequestBody]:
        """The body, until the block ends: a long answer must not hold a long prompt. Raises ``ProxyError``."""
        size = 0
        try:
            raw = bytearray()
            self._check_size(request.content_length or 0, 0)
            try:
                async with asyncio.timeout(UPLOAD_S):
                    while part := await request.content.readany():
                        self._check_size(len(part), size)
                        size += len(part)
                        self.body_bytes += len(part)
                        raw += part
            except TimeoutError:
                raise ProxyError(408, f"the body took more than {UPLOAD_S:g} s") from None
            except web.RequestPayloadError as error:
                raise ProxyError(400, f"the body is broken: {error}") from None
            body = RequestBody(request.path, bytes(raw))
            del raw
            yield body
            body.free()
        finally:
            self.body_bytes -= size

    def _check_size(self, more: int, size: int) -> None:
        """Raises ``ProxyError`` if there is no room for ``more`` bytes of a body, of which ``size`` are here."""
        limit = self.settings.max_total_payload_size
        if size + more > limit:
            raise ProxyError(413, f"the body is larger than {limit} bytes (--max-total-payload-size)")
        if self.body_bytes + more > limit:
            message = f"the bodies of all requests have more than {limit} bytes (--max-total-payload-size)"
            raise ProxyError(429, f"{message}; try again later")

    async def _ask(self, body: RequestBody, headers: Mapping[str, str], session: Session | None) -> Answer:
        """Ask pairs of engines until one answers. Raises ``ProxyError`` with the cause of the last failure."""
        to_prefill = self.conversations.pop_params(session, body.said, asyncio.get_running_loop().time())
        suspects: set[Engine] = set()
        refused: set[tuple[Engine, Engine]] = set()
        failure: LegFailedError | None = None
        for _ in range(1 + RETRIES):
            now = asyncio.get_running_loop().time()
            prefill, decode = self.prefill.pick(suspects, now), self.decode.pick(suspects, now)
            if (prefill, decode) in refused:
                break
            if failure is not None:
                self.engines.peer_errors.count("another attempt", f"another attempt, with {prefill}, {decode}", now)
                self.retries += 1
            with decode.working():
                try:
                    attempt = Attempt(self.engines, self.questions, body, headers, prefill, decode, to_prefill)
                    return await attempt.send()
                except LegFailedError as error:
                    failure = error.with_traceback(None)  # the frames in it hold the body
                    self._log(failure)
                    suspects.update(failure.suspects)
                    if not failure.is_lost:
                        refused.add((prefill, decode))
        assert failure is not None
        raise ProxyError(failure.status, failure.public)

    async def _pass_on(
        self, request: web.Request, stream: web.StreamResponse, answer: Answer, session: Session | None
    ) -> web.StreamResponse:
        content = answer.content
        try:
            if isinstance(content, Whole):
                now = asyncio.get_running_loop().time()
                shown = self.conversations.without_params(session, content.body, now)
                return _response(replace(content, body=shown))
            stream.headers.update(content.headers)
            await stream.prepare(request)
            async for data in self.conversations.shown(session, content):
                await stream.write(data)
            await stream.write_eof()
            return stream
        finally:
            if isinstance(content, Stream):
                content.close()
            if answer.prefill is not None:  # D that has finished has all blocks
                await end(answer.prefill)


def _passed_on(request: web.Request) -> dict[str, str]:
    """Several lines of a header become one. A value that is no valid UTF-8 stays inside: aiohttp would change it."""
    headers = {key: ",".join(request.headers.getall(key)) for key in PASSED_ON if key in request.headers}
    return {key: value for key, value in headers.items() if value.isprintable()}


def _session(request: web.Request, body: RequestBody) -> Session | None:
    name = request.headers.get(SESSION)
    return Session.of((request.headers.get("Authorization", ""), body.cache_salt, name), body.said) if name else None


def _response(answer: Whole) -> web.Response:
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


def _break_off(request: web.Request, stream: web.StreamResponse, status: int, message: str) -> web.StreamResponse:
    """Raises ``ProxyError`` if no answer has begun. Else the answer breaks off: its end must not look whole."""
    if not stream.prepared:
        raise ProxyError(status, message)
    if request.transport is not None:
        request.transport.abort()
    return stream
