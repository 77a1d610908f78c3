"""Serves a client's request, from the first byte of its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import web

from layerpush.apps.proxy.attempt import Answer, Attempt, end
from layerpush.apps.proxy.body import BodyError, RequestBody
from layerpush.apps.proxy.core import Proxy
from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.errors import ProxyError
from layerpush.apps.proxy.legs import LegFailedError, Stream, Whole

logger = logging.getLogger("layerpush.proxy")

UPLOAD_S = 60.0
"""Deadline for the arrival of a body."""
RETRIES = 2
"""Further attempts with a request before its first token."""


class Relay:
    """The course of one request. Its task is cancelled if the client leaves."""

    def __init__(self, proxy: Proxy, request: web.Request, headers: Mapping[str, str]) -> None:
        """``headers``: those for the engines."""
        self._proxy = proxy
        self._settings = proxy.settings
        self._request = request
        self._engine_headers = headers
        self._body_bytes = 0
        self._stream: web.StreamResponse | None = None

    async def serve(self) -> web.StreamResponse:
        """Returns the answer, as far as it is not sent yet. Raises ``ProxyError`` if there is none."""
        limit_s = self._settings.request_timeout_secs
        try:
            async with asyncio.timeout(limit_s):
                body = RequestBody(self._request.path, await self._read())
                answer = await self._ask(body)
                body.free()  # no other attempt follows, and a long answer must not hold a long prompt
                self._free()
                return await self._pass_on(answer)
        except BodyError as error:
            raise ProxyError(400, str(error)) from None
        except TimeoutError:
            message = f"the request took more than {limit_s:g} s (--request-timeout-secs)"
            return self._fail(504, message)
        finally:
            self._free()

    async def _read(self) -> bytes:
        self._check_size(self._request.content_length or 0)
        parts = bytearray()
        try:
            async with asyncio.timeout(UPLOAD_S):
                while part := await self._request.content.readany():
                    self._check_size(len(part))
                    self._proxy.body_bytes += len(part)
                    self._body_bytes += len(part)
                    parts += part
        except TimeoutError:
            raise ProxyError(408, f"the body took more than {UPLOAD_S:g} s") from None
        except web.RequestPayloadError as error:
            raise ProxyError(400, f"the body is broken: {error}") from None
        return bytes(parts)

    def _check_size(self, size: int) -> None:
        """Raises ``ProxyError`` if there is no room for so many bytes more."""
        limit = self._settings.max_total_payload_size
        if self._body_bytes + size > limit:
            raise ProxyError(413, f"the body is larger than {limit} bytes (--max-total-payload-size)")
        if self._proxy.body_bytes + size > limit:
            message = f"the bodies of all requests have more than {limit} bytes (--max-total-payload-size)"
            raise ProxyError(429, f"{message}; try again later")

    def _free(self) -> None:
        """The body no longer counts."""
        self._proxy.body_bytes -= self._body_bytes
        self._body_bytes = 0

    async def _ask(self, body: RequestBody) -> Answer:
        """Ask pairs of engines until one answers. Raises ``ProxyError`` with the cause of the last failure."""
        proxy = self._proxy
        suspects: set[Engine] = set()
        refused: set[tuple[Engine | None, Engine]] = set()
        failure: LegFailedError | None = None
        for _ in range(1 + RETRIES):
            now = asyncio.get_running_loop().time()
            decode = proxy.decode.pick(suspects, now)
            prefill = None if body.is_for_d_alone else proxy.prefill.pick(suspects, now)
            if (prefill, decode) in refused:
                break
            if failure is not None:
                logger.warning("another attempt, with %s", ", ".join(str(each) for each in (prefill, decode) if each))
                proxy.retries += 1
            attempt = Attempt(proxy.engines, proxy.introductions, body, self._engine_headers, prefill, decode)
            with decode.working():
                try:
                    return await attempt.send()
                except LegFailedError as error:
                    failure = error.with_traceback(None)  # the frames in it hold the body
                    self._note(failure)
                    suspects.update(failure.suspects)
                    if not failure.is_lost:
                        refused.add((prefill, decode))
        assert failure is not None
        raise ProxyError(failure.status, failure.public)

    def _note(self, failure: LegFailedError) -> None:
        logger.warning("%s", str(failure))  # a handler may keep the arguments
        if failure.is_gone:
            failure.engine.gone(asyncio.get_running_loop().time())

    async def _pass_on(self, answer: Answer) -> web.StreamResponse:
        content = answer.content
        try:
            if isinstance(content, Whole):
                return web.Response(status=content.status, headers=content.headers, body=content.body)
            response = self._stream = web.StreamResponse(headers=content.headers)
            await response.prepare(self._request)
            async for data in content:
                await response.write(data)
            await response.write_eof()
            return response
        except LegFailedError as failure:
            self._note(failure)
            return self._fail(failure.status, failure.public)
        finally:
            if isinstance(content, Stream):
                content.close()
            if answer.prefill is not None:  # D that has finished has all blocks
                await end(answer.prefill)

    def _fail(self, status: int, message: str) -> web.StreamResponse:
        """Raises ``ProxyError`` if no answer has begun. Else the answer breaks off: its end must not look whole."""
        if self._stream is None:
            raise ProxyError(status, message)
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._stream
