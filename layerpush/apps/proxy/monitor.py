"""Checks the health of the instances, and asks prefill engines for unknown identities."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable

from layerpush.apps.proxy.fleet import Fleet
from layerpush.apps.proxy.instance import Instance
from layerpush.apps.proxy.introduction import Introductions
from layerpush.apps.proxy.legs import Engines, LegFailedError

logger = logging.getLogger("layerpush.proxy")

PROBE_BACKOFF = 2
LONGEST_PROBE_INTERVAL_S = 300.0


class Monitor:
    """One task for each instance checks it. A request that needs the outcome at once calls ``check``."""

    def __init__(self, fleet: Fleet, engines: Engines, introductions: Introductions) -> None:
        self._fleet = fleet
        self._engines = engines
        self._introductions = introductions
        self._watches: dict[Instance, _Watch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check all instances while the block runs."""
        self.follow()
        try:
            yield
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self) -> None:
        """Watch the instances that the fleet lists now, and no others."""
        listed = list(self._fleet)
        for instance in self._watches.keys() - set(listed):
            logger.info("%s is no longer listed: it gets no new requests", instance)
            self._watches.pop(instance).end()
        for instance in listed:
            if instance not in self._watches:
                watch = self._watches[instance] = _Watch(instance, self._fleet, self._engines, self._introductions)
                task = asyncio.create_task(watch.run(), name=f"watch {instance}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def heed(self, failure: LegFailedError) -> None:
        """Note a failed request. After a lost connection, check at once. If nobody listens: unhealthy until then."""
        if failure.gone:
            failure.instance.lost(str(failure))
        watch = self._watches.get(failure.instance)
        if watch is not None and (failure.gone or failure.broken):
            watch.request_check()

    async def check(self, instances: Iterable[Instance]) -> None:
        """Check whether they are healthy now. A check that is under way counts."""
        await asyncio.gather(*(self._watches[instance].check() for instance in instances))


class _Watch:
    def __init__(self, instance: Instance, fleet: Fleet, engines: Engines, introductions: Introductions) -> None:
        self._instance = instance
        self._fleet = fleet
        self._engines = engines
        self._introductions = introductions
        self._settings = engines.settings
        self._checking: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._delivering: asyncio.Task[None] | None = None
        self._check_requested = asyncio.Event()
        self._ended = False
        self._next_probe = 0.0
        self._probe_interval_s = engines.settings.health_check_interval_s

    async def run(self) -> None:
        """Check the instance until ``end``. Cancellation also ends a check or probe that is under way."""
        try:
            await self._run()
            while tasks := self._under_way():
                await asyncio.wait(tasks)
        finally:
            tasks = self._under_way()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while not self._ended:
            self._check_requested.clear()
            try:
                await self.check()
            except Exception as error:  # any defect: the instance must still be watched
                logger.exception("%s cannot be checked", self._instance)
                self._instance.failed(f"cannot be checked: {error}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.health_check_interval_s):
                    await self._check_requested.wait()

    def end(self) -> None:
        """Start no more checks. One that is under way ends by itself: a request may wait for it."""
        self._ended = True
        self._check_requested.set()

    def _under_way(self) -> list[asyncio.Task[None]]:
        """Tasks that may outlive their callers, and have not ended."""
        tasks = (self._checking, self._probing, self._delivering)
        return [task for task in tasks if task is not None and not task.done()]

    def request_check(self) -> None:
        self._check_requested.set()

    async def check(self) -> None:
        """Callers share a check that is under way. It continues if they are cancelled."""
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
                await self._ask_identity()
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
            answer = await self._engines.get(self._instance, "/health", timeout_s)
        except LegFailedError as failure:
            return failure
        if answer.status == 200:
            return None
        return LegFailedError(self._instance, "status", f"answered {answer.status} to /health")

    async def _ask_identity(self) -> None:
        """Ask P for its identity, and wait for a short time. Until a busy P answers, dispatch is sequential."""
        if self._settings.sequential or self._instance.shared or self._probing is not None:
            return
        if asyncio.get_running_loop().time() < self._next_probe:
            return
        self._probing = asyncio.create_task(self._probe())
        await asyncio.wait((self._probing,), timeout=self._settings.health_check_timeout_s)
        if self._probing is not None:
            logger.info(
                "%s has not reported its engine id yet: until it does, a request goes to D after P has answered",
                self._instance,
            )

    async def _probe(self) -> None:
        """Ask P for its identity. Each try costs P a request, so the intervals between failed tries grow."""
        try:
            probe = await self._introductions.probe(self._instance)
        finally:
            self._probing = None
        if probe is not None and (decodes := self._fleet.healthy("decode")):
            self._delivering = asyncio.create_task(self._introductions.deliver(probe, decodes[0]))
        self._next_probe = asyncio.get_running_loop().time() + self._probe_interval_s
        self._probe_interval_s = min(PROBE_BACKOFF * self._probe_interval_s, LONGEST_PROBE_INTERVAL_S)
        if self._instance.identity is not None:
            self._next_probe, self._probe_interval_s = 0.0, self._settings.health_check_interval_s
