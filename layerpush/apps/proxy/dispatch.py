"""Sends one attempt at a request: to P and D at the same time, to one after the other, or to D alone."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from layerpush.apps.proxy.body import RequestBody
from layerpush.apps.proxy.identity import TO_PREFILL
from layerpush.apps.proxy.instance import Instance
from layerpush.apps.proxy.introduction import Introductions, transfer_params
from layerpush.apps.proxy.legs import Comments, Engines, LegFailedError, Stream, Whole

Mode: TypeAlias = Literal["concurrent", "sequential", "alone"]


class AttemptFailedError(Exception):
    """An attempt failed, and the client has got nothing of it: another attempt is possible.

    Its cause has no traceback: the frames in it hold the request's body, and the tasks that hold the cause.
    ``avoid``: instances that must not be asked again. ``spare``: instances to ask only if there are no others.
    """

    def __init__(
        self, cause: LegFailedError, avoid: frozenset[Instance], spare: frozenset[Instance] = frozenset()
    ) -> None:
        super().__init__(str(cause))
        self.cause = cause.with_traceback(None)
        self.cause.__context__ = None
        self.avoid = avoid
        self.spare = spare


@dataclass
class Answer:
    """The client's answer. ``prefill`` is P's leg if it may still run: await it, or cancel it.

    ``after_prefill_s``: seconds from P's answer until D's; 0 if D answered first. None if P was not asked, or refused.
    """

    content: Whole | Stream
    prefill: asyncio.Task[Whole] | None = None
    after_prefill_s: float | None = None


@dataclass(frozen=True)
class Attempt:
    """A request, and the instances that it goes to. Without ``prefill``, D computes the prompt."""

    body: RequestBody
    headers: Mapping[str, str]
    prefill: Instance | None
    decode: Instance
    comments: Comments

    @property
    def mode(self) -> Mode:
        """The order in which the engines are asked."""
        if self.prefill is None:
            return "alone"
        return self.prefill.dispatch


class Dispatcher:
    """Sends attempts. Each gets its own request id, so that no engine can confuse it with an earlier one."""

    def __init__(self, engines: Engines, introductions: Introductions) -> None:
        self._engines = engines
        self._introductions = introductions

    async def send(self, attempt: Attempt) -> Answer:
        """Send an attempt, and wait for D's first token. Raises ``AttemptFailedError``. Cancellation ends both legs."""
        request_id = str(uuid.uuid4())
        match attempt.mode:
            case "concurrent":
                return await self._concurrently(attempt, request_id)
            case "sequential":
                return await self._sequentially(attempt, request_id)
            case "alone":
                return await self._decoded(attempt, request_id, None)

    async def _concurrently(self, attempt: Attempt, request_id: str) -> Answer:
        assert attempt.prefill is not None
        assert attempt.prefill.identity is not None
        params = attempt.prefill.identity.to_decode(attempt.body.remote_request_id(request_id))
        prefill = asyncio.create_task(self._prefill(attempt, attempt.prefill, request_id))
        _count_work(attempt.prefill, attempt.body.prompt_tokens, prefill)
        decode = asyncio.create_task(self._decode(attempt, request_id, params))
        now, after_prefill_s = asyncio.get_running_loop().time, 0.0
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                prefilled_at = now()
                refusal = self._check_prefill(attempt.prefill, prefill)
                if refusal is not None:
                    await _end(decode)
                    return Answer(refusal)
                await asyncio.wait((decode,))
                after_prefill_s = now() - prefilled_at
            content = self._decode_result(attempt, attempt.prefill, prefill, decode)
            return Answer(content, prefill, after_prefill_s)
        except BaseException:  # also if the client has left: end both legs
            await _end(prefill, decode)
            raise

    def _check_prefill(self, instance: Instance, prefill: asyncio.Task[Whole]) -> Whole | None:
        """Check P's answer while D waits. Returns a refusal for the client, or None to wait for D's answer."""
        try:
            answer = prefill.result()
        except LegFailedError as failure:
            raise AttemptFailedError(failure, frozenset({instance})) from failure
        if answer.status != 200:
            return answer
        assumed, params = instance.identity, transfer_params(answer.body)
        self._introductions.learn(instance, params)
        if params is None:
            raise AttemptFailedError(_without_params(instance), frozenset({instance}))
        if instance.identity != assumed:
            changed = LegFailedError(instance, "restarted", "has restarted", detail=f"it is no longer {assumed}")
            raise AttemptFailedError(changed, frozenset())
        return None

    @staticmethod
    def _decode_result(
        attempt: Attempt, instance: Instance, prefill: asyncio.Task[Whole], decode: asyncio.Task[Whole | Stream]
    ) -> Whole | Stream:
        """D's answer. Until P has pushed, P may be the cause of D's failure."""
        try:
            return decode.result()
        except LegFailedError as failure:
            pushed = prefill.done() and not prefill.cancelled() and prefill.exception() is None
            if pushed or failure.gone or failure.broken:
                raise AttemptFailedError(failure, frozenset({attempt.decode})) from failure
            raise AttemptFailedError(failure, frozenset(), frozenset({instance, attempt.decode})) from failure

    async def _sequentially(self, attempt: Attempt, request_id: str) -> Answer:
        assert attempt.prefill is not None
        try:
            with attempt.prefill.working(attempt.body.prompt_tokens):
                prefilled = await self._prefill(attempt, attempt.prefill, request_id)
        except LegFailedError as failure:
            raise AttemptFailedError(failure, frozenset({attempt.prefill})) from failure
        if prefilled.status != 200:
            return Answer(prefilled)
        params = transfer_params(prefilled.body)
        if not self._engines.settings.sequential:
            self._introductions.learn(attempt.prefill, params)
        if params is None:
            raise AttemptFailedError(_without_params(attempt.prefill), frozenset({attempt.prefill}))
        now = asyncio.get_running_loop().time
        prefilled_at = now()
        answer = await self._decoded(attempt, request_id, params)
        answer.after_prefill_s = now() - prefilled_at
        return answer

    async def _decoded(self, attempt: Attempt, request_id: str, params: msgspec.Raw | None) -> Answer:
        try:
            return Answer(await self._decode(attempt, request_id, params))
        except LegFailedError as failure:
            raise AttemptFailedError(failure, frozenset({attempt.decode})) from failure

    async def _prefill(self, attempt: Attempt, instance: Instance, request_id: str) -> Whole:
        body = attempt.body
        return await self._engines.ask(
            instance, body.path, body.to_prefill(TO_PREFILL), {**attempt.headers, "X-Request-Id": request_id}
        )

    async def _decode(
        self, attempt: Attempt, request_id: str, params: Mapping[str, object] | msgspec.Raw | None
    ) -> Whole | Stream:
        body = attempt.body
        return await self._engines.decode(
            attempt.decode,
            body.path,
            body.to_decode(params),
            {**attempt.headers, "X-Request-Id": request_id},
            attempt.comments,
            streams=body.streams,
        )


def _count_work(instance: Instance, tokens: int, leg: asyncio.Task[Whole]) -> None:
    """Count the work of a leg before it begins, so that the next request sees it."""
    work = contextlib.ExitStack()
    work.enter_context(instance.working(tokens))
    leg.add_done_callback(lambda _: work.close())


async def _end(*legs: asyncio.Task[Whole] | asyncio.Task[Whole | Stream]) -> None:
    """Cancel the legs, and close their streams."""
    for leg in legs:
        leg.cancel()
    for ended in await asyncio.gather(*legs, return_exceptions=True):
        if isinstance(ended, Stream):
            ended.close()


def _without_params(instance: Instance) -> LegFailedError:
    return LegFailedError(
        instance, "no_params", "answered without kv_transfer_params: it has no KV connector that pushes"
    )
