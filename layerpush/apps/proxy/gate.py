"""Limits the requests under way. Further requests wait in a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from layerpush.apps.proxy.errors import ProxyError

RETRY_AFTER_S = 1


class Gate:
    """First come, first served. Used by the event loop's thread only."""

    def __init__(self, limit: int, queue_size: int, queue_timeout_s: float) -> None:
        self._limit = limit
        self._queue_size = queue_size
        self._queue_timeout_s = queue_timeout_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.under_way = 0

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

    def check(self) -> None:
        """Raises ``ProxyError`` with status 429 if the limit is reached and the queue is full."""
        if self.under_way >= self._limit and len(self._waiting) >= self._queue_size:
            raise ProxyError(
                429,
                f"{self._limit} requests are under way (--max-concurrent-requests) and {self._queue_size} wait "
                "(--queue-size); try again later",
                RETRY_AFTER_S,
            )

    async def _enter(self) -> None:
        self.check()
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
