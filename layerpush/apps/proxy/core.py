"""The parts of a proxy that live as long as its server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from layerpush.apps.proxy.engines import Fleet
from layerpush.apps.proxy.health import watch
from layerpush.apps.proxy.introduction import Introductions
from layerpush.apps.proxy.legs import Engines, http_session
from layerpush.apps.proxy.settings import Settings


class Proxy:
    """``engines`` and ``introductions`` exist while :meth:`running`."""

    engines: Engines
    introductions: Introductions

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.fleet = Fleet(settings)
        self.requests = 0
        self.retries = 0
        self.body_bytes = 0
        self.draining = False
        self._outliving: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the engines while the block runs; then end every task."""
        async with http_session(self.settings) as session:
            self.engines = Engines(session, self.settings)
            self.introductions = Introductions(self.fleet, self.engines)
            watches = [asyncio.create_task(watch(each, self.engines, self.introductions)) for each in self.fleet]
            try:
                yield
            finally:
                tasks = [*watches, *self._outliving]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def outlive(self, leg: asyncio.Task[Any]) -> None:
        """Let P's leg end after its request. Its result is ignored."""
        self._outliving.add(leg)
        leg.add_done_callback(self._ended)

    def _ended(self, leg: asyncio.Task[Any]) -> None:
        self._outliving.discard(leg)
        if not leg.cancelled():
            leg.exception()
