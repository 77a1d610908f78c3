"""Limits the requests under way, and the bytes of their bodies. Further requests wait in a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator

from layerpush.apps.proxy.errors import ProxyError

RETRY_AFTER_S = 1


class Payload:
    """The body of one request, as far as it has arrived. Used by the event loop's thread only."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._size = 0

    def grow(self, size: int) -> None:
        """Count ``size`` more bytes. Raises ``ProxyError`` with status 429 if all bodies together are too large."""
        self._gate.check_payload(size)
        self._gate.payload_bytes += size
        self._size += size

    def free(self) -> None:
        """The proxy no longer holds the body."""
        self._gate.payload_bytes -= self._size
        self._size = 0


class Gate:
    """First come, first served. Used by the event loop's thread only.

    A request passes ``uploading`` while its body arrives, and then ``entered`` at once. An upload takes a place of the
    queue, so that every admitted request fits. ``payload_limit``: the bytes that all bodies may have together.
    """

    def __init__(self, limit: int, queue_size: int, queue_timeout_s: float, payload_limit: int) -> None:
        self._limit = limit
        self._queue_size = queue_size
        self._queue_timeout_s = queue_timeout_s
        self._payload_limit = payload_limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.under_way = 0
        self.uploads = 0
        self.payload_bytes = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Hold one of the places. Raises ``ProxyError`` with status 429 if the queue is full, or after its time-out."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Count the request whose body arrives. Raises ``ProxyError`` with status 429 if nothing more fits."""
        self._check()
        self.uploads += 1
        try:
            yield
        finally:
            self.uploads -= 1

    @contextlib.contextmanager
    def payload(self) -> Iterator[Payload]:
        """A body, which is freed at the end of the block at the latest."""
        payload = Payload(self)
        try:
            yield payload
        finally:
            payload.free()

    def check_payload(self, size: int) -> None:
        """Raises ``ProxyError`` with status 429 if a body of this size does not fit now."""
        if self.payload_bytes + size > self._payload_limit:
            raise ProxyError(
                429,
                f"the bodies of all requests have more than {self._payload_limit} bytes (--max-total-payload-size); "
                "try again later",
                RETRY_AFTER_S,
            )

    def _check(self) -> None:
        if self.under_way + self.queued + self.uploads >= self._limit + self._queue_size:
            raise ProxyError(
                429,
                f"{self.under_way} requests are under way (--max-concurrent-requests) and "
                f"{self.queued + self.uploads} wait or send their bodies (--queue-size); try again later",
                RETRY_AFTER_S,
            )

    async def _enter(self) -> None:
        self._check()
        if self.under_way < self._limit:
            self.under_way += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await place
        except TimeoutError:
            self._give_up(place)
            raise ProxyError(
                429, f"waited {self._queue_timeout_s:g} s in the queue (--queue-timeout-secs)", RETRY_AFTER_S
            ) from None
        except BaseException:  # the client has left: free its place
            self._give_up(place)
            raise

    def _give_up(self, place: asyncio.Future[None]) -> None:
        if place in self._waiting:
            self._waiting.remove(place)
        elif place.done() and not place.cancelled():
            self._leave()  # the place was given to this request already

    def _leave(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.under_way -= 1
