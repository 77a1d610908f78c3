"""Runs the proxy until a signal stops it, and lets requests under way finish."""

from __future__ import annotations

import logging
import resource
import signal
from types import FrameType

import uvicorn

from layerpush.apps.proxy.app import make_app
from layerpush.apps.proxy.connection import Connection
from layerpush.apps.proxy.core import Proxy
from layerpush.apps.proxy.settings import Settings

logger = logging.getLogger("layerpush.proxy")

KEEP_ALIVE_S = 60
OTHER_FILES = 200


class DrainingServer(uvicorn.Server):
    """After SIGTERM or SIGINT it takes no new connections and finishes requests under way. A second SIGINT ends it."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(proxy),
                host=proxy.settings.host,
                port=proxy.settings.port,
                log_level=proxy.settings.log_level,
                access_log=False,
                http=Connection,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=proxy.settings.drain_timeout_s,
            )
        )
        self._proxy = proxy

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._proxy.draining:
            self._proxy.draining = True
            logger.info("draining: %d requests under way", self._proxy.gate.under_way)
        super().handle_exit(sig, frame)


def allow_connections(settings: Settings) -> None:
    """Raise the soft limit of open files: each request has a connection to its client, to P and to D."""
    wanted = 3 * settings.max_concurrent_requests + settings.queue_size + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            logger.warning(
                "%d open files are allowed, and %d may be needed: raise the limit (ulimit -n), or lower "
                "--max-concurrent-requests",
                allowed,
                wanted,
            )


def serve(settings: Settings) -> bool:
    """Serve until SIGTERM or SIGINT. False if the server could not start."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(asctime)s %(message)s")
    allow_connections(settings)
    server = DrainingServer(Proxy(settings))
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _ignore)  # uvicorn sends them again when it has drained
    try:
        server.run()
    except SystemExit:
        return False
    return server.started


def _ignore(*_: object) -> None:
    """Ignore the signal: the server has stopped already, and that is no failure."""
