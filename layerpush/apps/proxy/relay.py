"""Serves a client's request, from the first byte of its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from aiohttp import web

from layerpush.apps.proxy.attempt import Answer, Attempt, AttemptFailedError
from layerpush.apps.proxy.body import BodyError, Endpoint, RequestBody
from layerpush.apps.proxy.core import Proxy
from layerpush.apps.proxy.engines import Engine, Role
from layerpush.apps.proxy.errors import ProxyError, error_event
from layerpush.apps.proxy.legs import LegFailedError, Stream, Whole

logger = logging.getLogger("layerpush.proxy")

ERROR_TIMEOUT_S = 5.0
"""A client that does not read an error for so long gets none."""


class Relay:
    """The course of one request. Its task is cancelled if the client leaves."""

    def __init__(self, proxy: Proxy, request: web.Request, endpoint: Endpoint, headers: Mapping[str, str]) -> None:
        """``headers``: those for the engines."""
        self._proxy = proxy
        self._settings = proxy.settings
        self._request = request
        self._endpoint: Endpoint = endpoint
        self._engine_headers = headers
        self._body_bytes = 0
        self._stream: web.StreamResponse | None = None
        self._is_between_events = False
        self._avoid: set[Engine] = set()
        self._spare: set[Engine] = set()

    async def serve(self) -> web.StreamResponse:
        """Returns the answer, as far as it is not sent yet. Raises ``ProxyError`` if there is none."""
        limit_s = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                body = RequestBody(self._endpoint, await self._read())
                answer = await self._ask(body)
                body.free()  # no other attempt follows, and a long answer must not hold a long prompt
                self._free()
                return await self._pass_on(answer)
        except BodyError as error:
            raise ProxyError(400, str(error)) from None
        except TimeoutError:
            message = f"the request took more than {limit_s:g} s (--request-timeout-secs)"
            return await self._fail(504, message)
        finally:
            self._free()

    async def _read(self) -> bytes:
        limit_s = self._settings.upload_timeout_s
        self._check_size(self._request.content_length or 0)
        parts = bytearray()
        try:
            async with asyncio.timeout(limit_s):
                while part := await self._request.content.readany():
                    self._check_size(len(part))
                    self._proxy.body_bytes += len(part)
                    self._body_bytes += len(part)
                    parts += part
        except TimeoutError:
            raise ProxyError(408, f"the body took more than {limit_s:g} s (--upload-timeout-secs)") from None
        except web.RequestPayloadError as error:
            raise ProxyError(400, f"the body is broken: {error}") from None
        return bytes(parts)

    def _check_size(self, size: int) -> None:
        """Raises ``ProxyError`` if there is no room for so many bytes more."""
        limit = self._settings.max_payload_size
        if self._body_bytes + size > limit:
            raise ProxyError(413, f"the body is larger than {limit} bytes (--max-payload-size)")
        limit = self._settings.max_total_payload_size
        if self._proxy.body_bytes + size > limit:
            message = f"the bodies of all requests have more than {limit} bytes (--max-total-payload-size)"
            raise ProxyError(429, f"{message}; try again later")

    def _free(self) -> None:
        """The body no longer counts."""
        self._proxy.body_bytes -= self._body_bytes
        self._body_bytes = 0

    async def _ask(self, body: RequestBody) -> Answer:
        """Ask pairs of engines until one answers. Raises ``ProxyError`` with the cause of the last failure."""
        failure: LegFailedError | None = None
        refused_by: set[tuple[Engine | None, Engine]] = set()
        for _ in range(1 + self._settings.retry_max_retries):
            decode = self._pick("decode", failure)
            prefill = None if body.is_for_d_alone else self._pick("prefill", failure)
            if decode is None or (prefill is None and not body.is_for_d_alone) or (prefill, decode) in refused_by:
                break
            if failure is not None:
                engines = " and ".join(str(each) for each in (prefill, decode) if each)
                logger.warning("another attempt, with %s", engines)
                self._proxy.retries += 1
            attempt = Attempt(
                self._proxy.engines, self._proxy.introductions, body, self._engine_headers, prefill, decode
            )
            with decode.working():
                try:
                    return await attempt.send()
                except AttemptFailedError as error:
                    failure = error.cause
                    self._note(failure)
                    self._avoid |= error.avoid
                    self._spare |= error.spare
                    if failure.is_refused:
                        refused_by.add((prefill, decode))
        assert failure is not None
        has_room_soon = failure.is_gone or failure.is_local
        raise ProxyError(failure.status, failure.public, try_later=has_room_soon)

    def _pick(self, role: Role, failure: LegFailedError | None) -> Engine | None:
        """An engine for the next attempt, else None. Raises ``ProxyError`` if there is none for the first attempt."""
        chosen = self._proxy.fleet.pick(role, self._avoid, self._spare)
        if chosen is None and failure is None:
            raise self._proxy.fleet.none_left(role)
        return chosen

    def _note(self, failure: LegFailedError) -> None:
        logger.warning("%s", str(failure))  # a handler may keep the arguments
        if failure.is_gone:
            failure.engine.lost(str(failure))

    async def _pass_on(self, answer: Answer) -> web.StreamResponse:
        content, is_finished = answer.content, False
        try:
            if isinstance(content, Whole):
                is_finished = content.status == 200
                return web.Response(status=content.status, headers=content.headers, body=content.body)
            response = await self._pass_on_stream(content)
            is_finished = True
            return response
        except LegFailedError as failure:
            self._note(failure)
            return await self._fail(failure.status, failure.public)
        finally:
            if answer.prefill is not None:  # D that has finished has all blocks, and P's leg may end by itself
                if not is_finished:
                    answer.prefill.cancel()
                self._proxy.outlive(answer.prefill)

    async def _pass_on_stream(self, stream: Stream) -> web.StreamResponse:
        try:
            response = self._stream = web.StreamResponse(headers=stream.headers)
            await response.prepare(self._request)
            async for data in stream:
                await response.write(data)
                self._is_between_events = stream.has_events and data.endswith((b"\n\n", b"\n\r\n"))
            await response.write_eof()
            return response
        finally:
            stream.close()

    async def _fail(self, status: int, message: str) -> web.StreamResponse:
        """Raises ``ProxyError`` if no answer has begun. Else the error is the last event, or the answer breaks off.

        Its end must not look like the end of a whole answer.
        """
        response = self._stream
        if response is None:
            raise ProxyError(status, message)
        if self._is_between_events:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(ERROR_TIMEOUT_S):
                    await response.write(error_event(status, message))
                    await response.write_eof()
                    return response
        if self._request.transport is not None:
            self._request.transport.abort()
        return response
