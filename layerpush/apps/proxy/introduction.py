"""Learns the identities of prefill engines: from a question before the first request, and from every answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping

import msgspec

from layerpush.apps.proxy.body import RequestBody
from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.errors import shortened
from layerpush.apps.proxy.legs import Engines, LegFailedError
from layerpush.core.prefill_identity import TO_PREFILL, IdentityError, PrefillIdentity

logger = logging.getLogger("layerpush.proxy")

TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
IDENTITY_S = 5.0
"""So long requests to an engine wait for its identity. A busy one answers later."""


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def transfer_params(answer: bytes) -> msgspec.Raw | None:
    """The `kv_transfer_params` of P's answer, as raw JSON; None if it has none."""
    try:
        raw = msgspec.json.decode(answer, type=_Answer).kv_transfer_params
    except msgspec.DecodeError:
        return None
    return None if bytes(raw) == b"null" else raw


class Introductions:
    """Keeps the engines' identities correct. Logs when one is learned, changes, or cannot be learned."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._questions: dict[Engine, asyncio.Task[None]] = {}
        self._last_warning: dict[Engine, str] = {}

    async def introduce(self, engine: Engine, decode: Engine, body: RequestBody, headers: Mapping[str, str]) -> None:
        """Ask a prefill engine for its identity, unless it has been asked, and wait for the answer for a while.

        The question has the request's model and its headers, but is no part of a client's trace. ``decode`` gets the
        blocks that P computes for it.
        """
        now = asyncio.get_running_loop().time()
        if engine.asked_at is None:
            engine.asked_at = now
            own = {name: value for name, value in headers.items() if name.lower() not in TRACE_HEADERS}
            own["X-Request-Id"] = f"probe-{uuid.uuid4()}"
            self._questions[engine] = asyncio.create_task(self._ask(engine, decode, body.probe(), own))
        question = self._questions[engine]
        await asyncio.wait((question,), timeout=max(0.0, engine.asked_at + IDENTITY_S - now))

    async def close(self) -> None:
        """End all questions."""
        for question in (questions := list(self._questions.values())):
            question.cancel()
        await asyncio.gather(*questions, return_exceptions=True)

    async def _ask(self, engine: Engine, decode: Engine, probe: RequestBody, headers: Mapping[str, str]) -> None:
        """Without a D that takes its blocks, P would keep them until their lease ends, and count a failed push."""
        try:
            answer = await self._engines.ask(engine, probe.path, probe.to_prefill(TO_PREFILL), headers)
            if answer.status != 200:
                raise LegFailedError(engine, f"answered {answer.status}", detail=shortened(answer.body))
        except LegFailedError as failure:
            engine.asked_at = None  # the next request asks again
            self._use_sequential(engine, str(failure))
            return
        params = transfer_params(answer.body)
        self.learn(engine, params)
        if params is not None:
            with contextlib.suppress(LegFailedError):
                await self._engines.ask(decode, probe.path, probe.to_decode(params), headers)

    def learn(self, engine: Engine, params: msgspec.Raw | None) -> None:
        """Update ``engine.identity`` from P's own parameters. Afterwards it is correct, or None."""
        try:
            identity = PrefillIdentity.from_params(None if params is None else msgspec.json.decode(params))
        except IdentityError as error:
            self._use_sequential(engine, f"{engine}: {error}")
            return
        known = engine.identity
        if engine.is_shared or known == identity:
            return
        if known is not None and identity in engine.former:
            engine.is_shared = True
            self._use_sequential(
                engine,
                f"{engine} is {identity.engine_id} again, and was {known.engine_id}: several engines answer at this "
                "URL; give each an API server and a --prefill of its own",
            )
            return
        engine.identity = identity
        engine.former.add(identity)
        self._last_warning.pop(engine, None)
        logger.info("%s is %s: P and D are asked at the same time", engine, identity)

    def _use_sequential(self, engine: Engine, reason: str) -> None:
        """Log the reason, unless it is the same as the engine's last one."""
        engine.identity = None
        if self._last_warning.get(engine) != reason:
            self._last_warning[engine] = reason
            logger.warning("%s. Sequential dispatch for this engine: D is asked after it has answered", reason)
