"""The proxy's HTTP server. It runs until a signal stops it, and lets requests under way finish."""

from __future__ import annotations

import logging
import resource
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from layerpush.apps.proxy.body import CHAT, COMPLETIONS
from layerpush.apps.proxy.errors import ProxyError, error_object
from layerpush.apps.proxy.proxy import Proxy
from layerpush.apps.proxy.settings import Settings

logger = logging.getLogger("layerpush.proxy")

HEAD_TIMEOUT_S = 60.0
"""aiohttp closes a connection on which no whole head arrives in this time, at its beginning or after an answer."""
MAX_LINE_BYTES = 8190
"""The request line and each header have at most so many bytes."""
MAX_HEADERS = 128
LINGERING_S = 1.0
"""So long aiohttp reads on when it has refused a body, so that the client sees the answer."""
DRAIN_S = 300.0
"""After a signal, deadline for the requests that run."""
ENDPOINTS = "/v1/completions, /v1/chat/completions, /v1/models, /health"
RUNNER: Mapping[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "handler_cancellation": True,
    "keepalive_timeout": HEAD_TIMEOUT_S,
    "lingering_time": LINGERING_S,
    "max_line_size": MAX_LINE_BYTES,
    "max_field_size": MAX_LINE_BYTES,
    "max_headers": MAX_HEADERS,
    "shutdown_timeout": DRAIN_S / 2,  # aiohttp waits twice: before and after it gives up the rest of a body
}
"""Settings of aiohttp's server."""


def serve(settings: Settings) -> bool:
    """Serve until SIGTERM or SIGINT. False if the server could not start."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s")
    logging.getLogger("aiohttp.server").addFilter(_is_no_bad_head)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each request has three connections
    try:
        web.run_app(
            make_app(Proxy(settings)),
            host=settings.host,
            port=settings.port,
            backlog=2048,
            print=lambda _: logger.info("listening at %s:%d", settings.host, settings.port),
            **RUNNER,
        )
    except OSError as error:
        logger.error("the proxy cannot listen: %s", error)
        return False
    return True


def _is_no_bad_head(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback for each head that it refuses. Clients must not fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


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
