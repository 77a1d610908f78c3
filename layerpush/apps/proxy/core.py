"""The parts of a proxy that live as long as its server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from layerpush.apps.proxy.discovery import Discovery, Source, source_of
from layerpush.apps.proxy.dispatch import Dispatcher
from layerpush.apps.proxy.fleet import Fleet
from layerpush.apps.proxy.gate import Gate
from layerpush.apps.proxy.introduction import Introductions
from layerpush.apps.proxy.legs import Engines, http_session
from layerpush.apps.proxy.metrics import Metrics
from layerpush.apps.proxy.monitor import Monitor
from layerpush.apps.proxy.settings import Settings


class Proxy:
    """Created before the event loop runs; ``engines``, ``dispatcher`` and ``monitor`` exist while :meth:`running`."""

    engines: Engines
    dispatcher: Dispatcher
    monitor: Monitor

    def __init__(self, settings: Settings, source: Source | None = None) -> None:
        """``source`` lists the engines; None for that of the settings."""
        self.settings = settings
        self.fleet = Fleet(settings)
        self._source = source or source_of(settings)
        if self._source is None:
            self.fleet.update({"prefill": settings.prefill or (), "decode": settings.decode or ()})
        self.gate = Gate(
            settings.max_concurrent_requests,
            settings.queue_size,
            settings.queue_timeout_s,
            settings.max_total_payload_size,
        )
        self.metrics = Metrics(self.fleet, self.gate)
        self.draining = False
        self._outliving: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the engines while the block runs; then end every task."""
        async with http_session(self.settings) as session:
            self.engines = Engines(session, self.settings)
            introductions = Introductions(self.engines)
            self.dispatcher = Dispatcher(self.engines, introductions)
            self.monitor = Monitor(self.fleet, self.engines, introductions)
            async with self.monitor.running(), self._discovery():
                yield
            for leg in self._outliving:
                leg.cancel()
            await asyncio.gather(*self._outliving, return_exceptions=True)

    def _discovery(self) -> contextlib.AbstractAsyncContextManager[None]:
        if self._source is None:
            return contextlib.nullcontext()
        interval_s = self.settings.health_check_interval_s
        return Discovery(self._source, self.fleet, self.monitor, interval_s).running()

    def outlive(self, leg: asyncio.Task[Any]) -> None:
        """Let P's leg end after its request. Its result is ignored."""
        self._outliving.add(leg)
        leg.add_done_callback(self._ended)

    def _ended(self, leg: asyncio.Task[Any]) -> None:
        self._outliving.discard(leg)
        if not leg.cancelled():
            leg.exception()
