"""The parts of a proxy that live as long as its server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from layerpush.apps.proxy.engines import Pool
from layerpush.apps.proxy.introduction import Introductions
from layerpush.apps.proxy.legs import Engines, http_session
from layerpush.apps.proxy.settings import Settings


class Proxy:
    """``engines`` and ``introductions`` exist while :meth:`running`."""

    engines: Engines
    introductions: Introductions

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.prefill = Pool("prefill", settings.prefill)
        self.decode = Pool("decode", settings.decode)
        self.requests = 0
        self.retries = 0
        self.body_bytes = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have an HTTP session while the block runs; then end questions to engines."""
        async with http_session() as session:
            self.engines = Engines(session, self.settings.engine_timeout_secs)
            self.introductions = Introductions(self.engines)
            try:
                yield
            finally:
                await self.introductions.close()
