"""Watches the instances: health checks, and questions who a prefill engine is whenever that is not known."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from layerpush.apps.proxy.instance import Instance
from layerpush.apps.proxy.introduction import Introductions
from layerpush.apps.proxy.legs import Engines, LegFailedError
from layerpush.apps.proxy.settings import Settings

logger = logging.getLogger("layerpush.apps.proxy")

PROBE_BACKOFF = 2
LONGEST_PROBE_INTERVAL_S = 300.0


class Monitor:
    """One task for each instance. A check is also made at once, out of turn, for a request that needs its outcome."""

    def __init__(
        self,
        instances: Iterable[Instance],
        engines: Engines,
        introductions: Introductions,
        headers: Mapping[str, str],
        settings: Settings,
    ) -> None:
        everyone = list(instances)
        decodes = [each for each in everyone if each.role == "decode"]
        self._watches = {each: _Watch(each, decodes, engines, introductions, headers, settings) for each in everyone}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check everything once, then for as long as the block lasts."""
        tasks = [asyncio.create_task(watch.run(), name=f"watch {each}") for each, watch in self._watches.items()]
        try:
            yield
        finally:
            for watch in self._watches.values():
                tasks += watch.under_way()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def heed(self, failure: LegFailedError) -> None:
        """A request's connection has failed: check at once, and ask nobody meanwhile who does not even listen."""
        if failure.gone:
            failure.instance.lost(str(failure))
        if failure.gone or failure.broken:
            self._watches[failure.instance].hurry()

    async def check(self, instances: Iterable[Instance]) -> None:
        """Find out whether they are healthy now, by checks that may be under way already."""
        await asyncio.gather(*(self._watches[instance].check() for instance in instances))


class _Watch:
    def __init__(
        self,
        instance: Instance,
        decodes: Sequence[Instance],
        engines: Engines,
        introductions: Introductions,
        headers: Mapping[str, str],
        settings: Settings,
    ) -> None:
        self._instance = instance
        self._decodes = decodes
        self._engines = engines
        self._introductions = introductions
        self._headers = headers
        self._settings = settings
        self._checking: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._delivering: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._next_probe = 0.0
        self._probe_interval_s = settings.health_check_interval_s

    async def run(self) -> None:
        while True:
            self._hurry.clear()
            try:
                await self.check()
            except Exception as error:  # whatever it was, an engine that nobody watches any more would be worse
                logger.exception("%s cannot be checked", self._instance)
                self._instance.failed(f"cannot be checked: {error}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.health_check_interval_s):
                    await self._hurry.wait()

    def under_way(self) -> list[asyncio.Task[None]]:
        """What goes on although nobody may wait for it."""
        return [task for task in (self._checking, self._probing, self._delivering) if task is not None]

    def hurry(self) -> None:
        self._hurry.set()

    async def check(self) -> None:
        """Those who ask while a check is under way share it, and it outlives them."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        instance = self._instance
        was_healthy = instance.healthy
        problem = await self._ask_health()
        if problem is not None and problem.exhausted:
            logger.warning("%s could not be checked: %s", instance, problem)
        elif problem is not None:
            instance.failed(str(problem), problem.gone)
            self._next_probe, self._probe_interval_s = 0.0, self._settings.health_check_interval_s
        else:
            if instance.role == "prefill" and instance.identity is None:
                await self._introduce()
            instance.passed()
        if was_healthy != instance.healthy:
            logger.log(
                logging.INFO if instance.healthy else logging.WARNING,
                "%s is %s",
                instance,
                "healthy" if instance.healthy else f"unhealthy: {instance.problem}",
            )

    async def _ask_health(self) -> LegFailedError | None:
        timeout_s = self._settings.health_check_timeout_s
        try:
            answer = await self._engines.get(self._instance, "/health", self._headers, timeout_s)
        except LegFailedError as failure:
            return failure
        if answer.status == 200:
            return None
        return LegFailedError(self._instance, "status", f"answered {answer.status} to /health")

    async def _introduce(self) -> None:
        """Ask P who it is, and wait a little for the answer: until a busy P gives it, dispatch is sequential."""
        if self._settings.sequential or self._instance.shared or self._probing is not None:
            return
        if asyncio.get_running_loop().time() < self._next_probe:
            return
        self._probing = asyncio.create_task(self._probe())
        await asyncio.wait((self._probing,), timeout=self._settings.health_check_timeout_s)
        if self._probing is not None:
            logger.info("%s has not said yet who it is: until then D is asked after it has answered", self._instance)

    async def _probe(self) -> None:
        """A question costs P a request, so one that was in vain is repeated ever more seldom."""
        try:
            probe = await self._introductions.probe(self._instance)
        finally:
            self._probing = None
        decode = next((each for each in self._decodes if each.healthy), None)
        if probe is not None and decode is not None:
            self._delivering = asyncio.create_task(self._introductions.deliver(probe, decode))
        self._next_probe = asyncio.get_running_loop().time() + self._probe_interval_s
        self._probe_interval_s = min(PROBE_BACKOFF * self._probe_interval_s, LONGEST_PROBE_INTERVAL_S)
        if self._instance.identity is not None:
            self._next_probe, self._probe_interval_s = 0.0, self._settings.health_check_interval_s
