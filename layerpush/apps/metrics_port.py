"""`layerpush metrics`: the metrics of one engine on a port of their own. The engine's own port has its whole API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TypeAlias

import aiohttp
from aiohttp import web

from layerpush.apps import http_server
from layerpush.apps.http_server import ClientConnections

logger = logging.getLogger("layerpush.metrics")

PATH = "/metrics"
SCRAPE_S = 10.0
"""Deadline for the engine's answer, in seconds: Prometheus' own default."""
MAX_SCRAPES = 8
"""The most requests that wait for the engine."""
MAX_CONNECTIONS = 64

_Scraped: TypeAlias = tuple[int, bytes, str]
"""Status, body and type of an answer."""


class Metrics:
    """Answers GET of ``PATH`` with that of ``engine``, a base URL, and all other requests with status 404 or 405.

    It passes nothing of the request on. It asks the engine for one answer at a time: all that wait share it. It answers
    502 if the engine has none, and 429 if ``MAX_SCRAPES`` wait.
    """

    def __init__(self, engine: str) -> None:
        self.connections = ClientConnections(logger, MAX_CONNECTIONS)
        self.app = web.Application()
        self.app.cleanup_ctx.append(self._running)
        self.app.router.add_get(PATH, self._answer, allow_head=False)
        self._url = engine + PATH
        self._scrapes = 0
        self._scrape: asyncio.Task[_Scraped | None] | None = None

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SCRAPE_S)) as self._session:
            yield
            if self._scrape is not None:
                self._scrape.cancel()

    async def _answer(self, request: web.Request) -> web.Response:
        if self._scrapes >= MAX_SCRAPES:
            headers = {"Retry-After": "1"}
            raise web.HTTPTooManyRequests(text=f"{MAX_SCRAPES} requests wait for the engine\n", headers=headers)
        self._scrapes += 1
        try:
            with self.connections.working(request):
                if self._scrape is None or self._scrape.done():
                    self._scrape = asyncio.create_task(self._ask())
                scraped = await asyncio.shield(self._scrape)
        finally:
            self._scrapes -= 1
        if scraped is None:
            raise web.HTTPBadGateway(text="the engine does not answer\n")
        status, body, kind = scraped
        return web.Response(status=status, body=body, headers={"Content-Type": kind})

    async def _ask(self) -> _Scraped | None:
        """The engine's answer within ``SCRAPE_S``, if it has one. The question goes on if all who wait for it leave."""
        try:
            async with self._session.get(self._url, allow_redirects=False) as answer:
                return answer.status, await answer.read(), answer.headers.get("Content-Type", "text/plain")
        except (aiohttp.ClientError, TimeoutError):
            return None


def serve(engine: str, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises ``OSError`` if the port is not available."""
    metrics = Metrics(engine)
    asyncio.run(http_server.serve(metrics.app, metrics.connections, host, port, SCRAPE_S))
