"""Checks the health of the engines, and asks prefill engines for their identities."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.introduction import Introductions
from layerpush.apps.proxy.legs import Engines, LegFailedError

logger = logging.getLogger("layerpush.proxy")

IDENTITY_S = 5.0
"""So long an engine waits for the answer with its identity before it gets requests. A busy one answers later."""


async def watch(engine: Engine, engines: Engines, introductions: Introductions) -> None:
    """Check the engine again and again. Cancellation also ends a question that is under way."""
    interval_s = engines.settings.health_check_interval_s
    question: asyncio.Task[None] | None = None
    try:
        while True:
            was_healthy = engine.healthy
            failure = await _failure(engine, engines)
            if failure is not None:
                if not failure.is_local:
                    engine.failed(str(failure), is_gone=failure.is_gone)
            else:
                if engine.role == "prefill" and not engine.is_asked:
                    question = asyncio.create_task(introductions.probe(engine))
                    await asyncio.wait((question,), timeout=IDENTITY_S)
                engine.passed()
            if was_healthy != engine.healthy:
                level, state = (logging.INFO, "healthy") if engine.healthy else (logging.WARNING, "unhealthy: ")
                logger.log(level, "%s is %s%s", engine, state, "" if engine.healthy else engine.problem)
            await asyncio.sleep(interval_s)
    finally:
        if question is not None:
            question.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await question


async def _failure(engine: Engine, engines: Engines) -> LegFailedError | None:
    try:
        answer = await engines.get(engine, "/health", max(engines.settings.health_check_interval_s, 1.0))
    except LegFailedError as failure:
        return failure
    except Exception as error:  # any defect: the engine must still be watched
        logger.exception("%s cannot be checked", engine)
        return LegFailedError(engine, f"cannot be checked: {error}")
    return None if answer.status == 200 else LegFailedError(engine, f"answered {answer.status} to /health")
