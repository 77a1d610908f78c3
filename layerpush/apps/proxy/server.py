"""Runs the proxy until a signal stops it, and lets requests under way finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from layerpush.apps.proxy.app import make_app
from layerpush.apps.proxy.core import Proxy
from layerpush.apps.proxy.settings import Settings

logger = logging.getLogger("layerpush.proxy")

HEAD_TIMEOUT_S = 60.0
"""aiohttp closes a connection on which no whole head arrives in this time, at its beginning or after an answer."""
MAX_LINE_BYTES = 8190
"""The request line and each header have at most so many bytes."""
MAX_HEADERS = 128
LINGERING_S = 1.0
"""So long aiohttp reads on when it has refused a body, so that the client sees the answer."""
POLL_S = 0.05


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
        shutdown_timeout=0.1,
    )
    try:
        await runner.setup()
        site = web.TCPSite(runner, proxy.settings.host, proxy.settings.port, backlog=2048)
        await site.start()
        try:
            yield
        finally:
            proxy.draining = True
            logger.info("draining: %d requests under way", proxy.requests)
            await site.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(proxy.settings.drain_timeout_s):
                    while proxy.requests:
                        await asyncio.sleep(POLL_S)
    finally:
        await runner.cleanup()


def serve(settings: Settings) -> bool:
    """Serve until SIGTERM or SIGINT. False if the server could not start."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(asctime)s %(message)s")
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
