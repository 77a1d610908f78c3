"""The HTTP server of `layerpush proxy` and `layerpush metrics`. It bounds what clients can make it hold and log."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import resource
import signal
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web, web_protocol
from aiohttp.http_exceptions import HttpProcessingError

from layerpush.telemetry.peer_errors import PeerErrors

HEAD_TIMEOUT_S = 60.0
"""aiohttp closes a connection on which no whole head arrives in this time, at its beginning or after an answer."""
MAX_LINE_BYTES = 2048
"""The request line and each header have at most so many bytes."""
MAX_HEADERS = 40
LINGERING_S = 1.0
"""So long aiohttp reads on when it has refused a body, so that the client sees the answer."""
BACKLOG = 2048
NO_FILE_PAUSE_S = 0.1
CLOSED_AT_ONCE = 64
"""One in so many connections is closed at a time: to choose them takes a millisecond."""
SETTINGS: Mapping[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "handler_cancellation": True,
    "keepalive_timeout": HEAD_TIMEOUT_S,
    "lingering_time": LINGERING_S,
    "max_line_size": MAX_LINE_BYTES,
    "max_field_size": MAX_LINE_BYTES,
    "max_headers": MAX_HEADERS,
}
"""Settings of aiohttp's server."""

web_protocol.MAX_MSG_QUEUE_SIZE = 1  # aiohttp reads 32 heads ahead of an answer, and has no setting for it


class ClientConnections:
    """Open connections of clients, at most ``limit``. One event loop.

    Beyond, and when the process may open no more files, some without a request are closed: of the host with the most
    of these, those whose last request is oldest.
    """

    def __init__(self, logger: logging.Logger, limit: int) -> None:
        """``limit`` is at most a quarter of the files that the process may open."""
        self.limit = min(limit, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._seen: WeakKeyDictionary[asyncio.BaseTransport, float] = WeakKeyDictionary()
        """The time of each connection's last request, or of its begin."""
        self._working: set[asyncio.BaseTransport] = set()
        self._peer_errors = PeerErrors(logger)

    @contextlib.contextmanager
    def working(self, request: web.Request) -> Iterator[None]:
        """While the block runs, the request's connection is not closed in favour of another."""
        transport = request.transport
        if transport is None:  # its client has left
            yield
            return
        self._working.add(transport)
        try:
            yield
        finally:
            self._working.discard(transport)
            self._seen[transport] = asyncio.get_running_loop().time()

    async def accept(self, listening: socket.socket, server: web.Server) -> None:
        """Accept connections and have ``server`` serve them, until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # no file is left, or no memory
                self._peer_errors.count("no file left", f"cannot accept a connection: {error}", loop.time())
                self._make_room()
                await asyncio.sleep(NO_FILE_PAUSE_S)  # the next call would fail as fast
                continue
            if len(self._seen) >= self.limit:
                text = f"more than {self.limit} connections; closed old ones"
                self._peer_errors.count("too many connections", text, loop.time())
                if not self._make_room():
                    connection.close()
                    continue
            try:
                transport, _ = await loop.connect_accepted_socket(server, connection)
            except OSError:  # it has gone
                connection.close()
            else:
                self._seen[transport] = loop.time()

    def _make_room(self) -> bool:
        """Close some connections; those that are closing already come last. False if each one has a request."""
        idle = {each: _host(each) for each in self._seen if each not in self._working}
        crowd = Counter(idle.values())

        def order(each: asyncio.BaseTransport) -> tuple[bool, int, float]:
            return each.is_closing(), -crowd[idle[each]], self._seen[each]

        closed = heapq.nsmallest(max(1, self.limit // CLOSED_AT_ONCE), idle, key=order)
        for transport in closed:
            # Drop the part of an answer that the kernel still holds.
            with contextlib.suppress(OSError):  # it is closed
                socket_of = transport.get_extra_info("socket")
                socket_of.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert isinstance(transport, asyncio.WriteTransport)
            transport.abort()
        return bool(closed)


def _host(transport: asyncio.BaseTransport) -> str | None:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else None


async def serve(
    app: web.Application,
    connections: ClientConnections,
    host: str,
    port: int,
    drain_s: float,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT. Then the requests that run have ``drain_s``.

    Calls ``on_start`` when clients can connect. Raises ``OSError`` if the port is not available.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_no_bad_head)
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with serving(app, connections, host, port, drain_s):
        on_start()
        await stop.wait()


@contextlib.asynccontextmanager
async def serving(
    app: web.Application, connections: ClientConnections, host: str, port: int, drain_s: float, **settings: Any
) -> AsyncIterator[None]:
    """Serve while the block runs. ``settings``: other values for some of ``SETTINGS``. Raises ``OSError``."""
    timeout_s = drain_s / 2  # aiohttp waits twice: before and after it gives up the rest of a body
    runner = web.AppRunner(app, shutdown_timeout=timeout_s, **{**SETTINGS, **settings})
    bound = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    async with contextlib.AsyncExitStack() as stack:
        sockets = [stack.enter_context(each.dup()) for each in bound.sockets]
        bound.close()
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        server = runner.server
        assert server is not None
        for each in sockets:
            each.listen(BACKLOG)
        accepting = [asyncio.create_task(connections.accept(each, server)) for each in sockets]
        try:
            yield
        finally:
            for task in accepting:
                task.cancel()
            await asyncio.wait(accepting)
            for each in sockets:
                each.close()


def _is_no_bad_head(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback for each head that it refuses. Clients must not fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
