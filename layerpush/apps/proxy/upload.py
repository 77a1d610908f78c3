"""Reads the body of a client's request, within its limits, and then relays the request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from layerpush.apps.proxy.body import BodyError, Endpoint, RequestBody
from layerpush.apps.proxy.core import Proxy
from layerpush.apps.proxy.errors import ProxyError
from layerpush.apps.proxy.gate import Payload
from layerpush.apps.proxy.relay import Relay

TOO_SLOW = 408


class Upload(Response):
    """The response to one request. It reads the body only while it is sent, so that it frees the body at its end."""

    def __init__(self, proxy: Proxy, endpoint: Endpoint, headers: Mapping[str, str]) -> None:
        """``headers``: those for the engines."""
        super().__init__()
        self._proxy = proxy
        self._endpoint: Endpoint = endpoint
        self._engine_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ``ProxyError`` if the body is refused."""
        began = asyncio.get_running_loop().time()
        with self._proxy.gate.payload() as payload:
            try:
                with self._proxy.gate.uploading():
                    raw = await self._read(Request(scope, receive), payload)
                body = RequestBody(self._endpoint, raw)
            except BodyError as error:
                self._count("client_error")
                raise ProxyError(400, str(error)) from None
            except ProxyError as error:
                self._count("refused" if error.status == 429 else "client_error")
                raise
            except ClientDisconnect:
                self._count("cancelled")
                return
            del raw
            await Relay(self._proxy, body, payload, self._engine_headers, began).serve(receive, send)

    async def _read(self, request: Request, payload: Payload) -> bytes:
        limit, limit_s = self._proxy.settings.max_payload_size, self._proxy.settings.upload_timeout_s
        too_large = ProxyError(413, f"the body is larger than {limit} bytes (--max-payload-size)")
        announced = int(request.headers.get("content-length", 0))
        if announced > limit:
            raise too_large
        self._proxy.gate.check_payload(announced)
        parts = bytearray()
        try:
            async with asyncio.timeout(limit_s):
                async for part in request.stream():
                    if len(parts) + len(part) > limit:
                        raise too_large
                    payload.grow(len(part))
                    parts += part
        except TimeoutError:
            raise ProxyError(TOO_SLOW, f"the body took more than {limit_s:g} s (--upload-timeout-secs)") from None
        return bytes(parts)

    def _count(self, outcome: str) -> None:
        self._proxy.metrics.requests.labels(self._endpoint, outcome).inc()
