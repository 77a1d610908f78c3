"""`layerpush metrics`: the metrics of one engine on a port of their own. The engine's own port has its whole API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

PATH = "/metrics"
SCRAPE_S = 10.0
"""Deadline for the engine's answer, in seconds: Prometheus' own default."""


def make_app(engine: str) -> web.Application:
    """Answers GET of ``PATH`` with that of ``engine``, a base URL, and all other requests with status 404 or 405.

    It passes nothing of the request on. It asks the engine for one answer at a time, and answers 502 if the engine
    has none.
    """
    turn = asyncio.Lock()
    session: web.AppKey[aiohttp.ClientSession] = web.AppKey("session", aiohttp.ClientSession)

    async def sessions(app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=SCRAPE_S)
        async with aiohttp.ClientSession(timeout=timeout) as app[session]:
            yield

    async def metrics(request: web.Request) -> web.Response:
        try:
            async with turn, request.app[session].get(engine + PATH, allow_redirects=False) as answer:
                headers = {"Content-Type": answer.headers.get("Content-Type", "text/plain")}
                return web.Response(status=answer.status, body=await answer.read(), headers=headers)
        except (aiohttp.ClientError, TimeoutError):
            raise web.HTTPBadGateway(text="the engine does not answer\n") from None

    app = web.Application()
    app.cleanup_ctx.append(sessions)
    app.router.add_get(PATH, metrics, allow_head=False)
    return app


def serve(engine: str, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises ``OSError`` if the port is not available."""
    web.run_app(make_app(engine), host=host, port=port, print=None, access_log=None)
