"""The proxy's HTTP server. It runs until a signal stops it, and lets requests under way finish."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable

from aiohttp import web

from layerpush.apps import http_server
from layerpush.apps.proxy.body import CHAT, COMPLETIONS
from layerpush.apps.proxy.errors import ProxyError, error_object
from layerpush.apps.proxy.proxy import Proxy
from layerpush.apps.proxy.settings import Settings

logger = logging.getLogger("layerpush.proxy")

DRAIN_S = 300.0
"""After a signal, deadline for the requests that run."""
ENDPOINTS = "/v1/completions, /v1/chat/completions, /v1/models, /health"


def serve(settings: Settings) -> bool:
    """Serve until SIGTERM or SIGINT. False if the server could not start."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each request has three connections
    proxy = Proxy(settings)

    def log_start() -> None:
        logger.info("listening at %s:%d", settings.host, settings.port)

    try:
        asyncio.run(
            http_server.serve(make_app(proxy), proxy.connections, settings.host, settings.port, DRAIN_S, log_start)
        )
    except OSError as error:
        logger.error("the proxy cannot listen: %s", error)
        return False
    return True


def make_app(proxy: Proxy) -> web.Application:
    """The application in which the proxy runs."""

    async def log_drain(_: web.Application) -> None:
        logger.info("draining: %d requests under way", proxy.requests)

    app = web.Application(middlewares=[_errors])
    app.cleanup_ctx.append(proxy.running)
    app.on_shutdown.append(log_drain)
    for path in (COMPLETIONS, CHAT):
        app.router.add_post(path, proxy.complete)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_get("/health", proxy.health)
    return app


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give errors the format of the OpenAI API."""
    try:
        return await handler(request)
    except ProxyError as error:
        status, message, headers = error.status, error.message, error.headers
    except web.HTTPException as error:
        message = f"{error.reason}: {request.method} {request.path}; the proxy serves {ENDPOINTS}"
        status, headers = error.status, {}
    response = web.json_response(error_object(status, message), status=status, headers=headers)
    if not request.content.is_eof():  # where the next request begins is unknown
        response.force_close()
    return response
