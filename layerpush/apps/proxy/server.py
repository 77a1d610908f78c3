"""The proxy's HTTP server. It runs until a signal stops it, and lets requests under way finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from layerpush.apps.proxy.body import CHAT, COMPLETIONS
from layerpush.apps.proxy.core import Proxy
from layerpush.apps.proxy.errors import ProxyError, error_body
from layerpush.apps.proxy.legs import LegFailedError
from layerpush.apps.proxy.relay import Relay
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
PASSED_ON = ("authorization", "traceparent", "tracestate", "baggage", "user-agent")
"""Headers of a client that are passed on to engines. Only the proxy sets X-Request-Id and X-data-parallel-rank."""
ENDPOINTS = "/v1/completions, /v1/chat/completions, /v1/models, /health"


@contextlib.asynccontextmanager
async def serving(proxy: Proxy) -> AsyncIterator[None]:
    """Serve while the block runs. Then take no more connections, and let the requests that run finish.

    Raises ``OSError`` if the port is not available.
    """
    runner = web.AppRunner(
        make_app(proxy),
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        keepalive_timeout=HEAD_TIMEOUT_S,
        lingering_time=LINGERING_S,
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
        max_headers=MAX_HEADERS,
        shutdown_timeout=DRAIN_S / 2,  # aiohttp waits twice: before and after it gives up the rest of a body
    )
    async with proxy.running(), contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, proxy.settings.host, proxy.settings.port, backlog=2048).start()
        try:
            yield
        finally:
            logger.info("draining: %d requests under way", proxy.requests)


def serve(settings: Settings) -> bool:
    """Serve until SIGTERM or SIGINT. False if the server could not start."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s")
    logging.getLogger("aiohttp.server").addFilter(_is_no_bad_head)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each request has three connections
    try:
        asyncio.run(_until_signal(settings))
    except OSError as error:
        logger.error("the proxy cannot listen: %s", error)
        return False
    return True


def _is_no_bad_head(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback for each head that it refuses. Clients must not fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _until_signal(settings: Settings) -> None:
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    async with serving(Proxy(settings)):
        logger.info("listening at %s:%d", settings.host, settings.port)
        await stopped.wait()


def make_app(proxy: Proxy) -> web.Application:
    """The application of a proxy that runs."""
    app = web.Application(middlewares=[_errors])
    for path in (COMPLETIONS, CHAT):
        app.router.add_post(path, partial(_complete, proxy))
    app.router.add_get("/v1/models", partial(_models, proxy))
    app.router.add_get("/health", partial(_health, proxy))
    return app


async def _complete(proxy: Proxy, request: web.Request) -> web.StreamResponse:
    """Answer a request for a completion."""
    if proxy.requests >= proxy.settings.max_concurrent_requests:
        message = f"{proxy.requests} requests are under way (--max-concurrent-requests); try again later"
        raise ProxyError(429, message)
    proxy.requests += 1
    try:
        return await Relay(proxy, request, _passed_on(request)).serve()
    finally:
        proxy.requests -= 1


async def _models(proxy: Proxy, request: web.Request) -> web.Response:
    """The list of the first D that answers."""
    for decode in proxy.decode.engines:
        with contextlib.suppress(LegFailedError):
            answer = await proxy.engines.models(decode, _passed_on(request))
            return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
    raise ProxyError(503, "no decode engine gives its list of models")


async def _health(proxy: Proxy, _: web.Request) -> web.Response:
    """The proxy lives. The engines are not checked."""
    return web.json_response({"requests": proxy.requests, "retries": proxy.retries})


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give errors the format of the OpenAI API."""
    codings = [each.strip().lower() for each in request.headers.getall("Transfer-Encoding", [])]
    try:
        if codings not in ([], ["chunked"]):  # aiohttp takes others before it, too
            raise ProxyError(400, "Transfer-Encoding must be chunked, and nothing else")
        return await handler(request)
    except ProxyError as error:
        status, message, headers = error.status, error.message, error.headers
    except web.HTTPException as error:
        message = f"{error.reason}: {request.method} {request.path}; the proxy serves {ENDPOINTS}"
        status, headers = error.status, {}
    body = error_body(status, message)
    response = web.Response(status=status, headers=headers, body=body, content_type="application/json")
    if codings not in ([], ["chunked"]) or not request.content.is_eof():  # where the next request begins is unknown
        response.force_close()
    return response


def _passed_on(request: web.Request) -> dict[str, str]:
    """Several lines of a header become one. A value that is no valid UTF-8 stays inside: aiohttp would change it."""
    headers = {key: ",".join(request.headers.getall(key)) for key in PASSED_ON if key in request.headers}
    return {key: value for key, value in headers.items() if value.isprintable()}
