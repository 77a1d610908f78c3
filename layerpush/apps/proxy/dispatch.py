"""One attempt at a request: P and D at the same time, one after the other, or D alone."""

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
    """An attempt that may be made again: the client has seen nothing of it.

    ``avoid``: instances that are not to be asked again; ``spare``: those to be asked only if there are no others.
    """

    def __init__(
        self, cause: LegFailedError, avoid: frozenset[Instance], spare: frozenset[Instance] = frozenset()
    ) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.avoid = avoid
        self.spare = spare


@dataclass
class Answer:
    """What the client gets. ``prefill`` is P's leg where that still runs: it is to be awaited, or cancelled."""

    content: Whole | Stream
    prefill: asyncio.Task[Whole] | None = None


@dataclass(frozen=True)
class Attempt:
    """A request, and the instances that it goes to; without ``prefill``, D computes the prompt."""

    body: RequestBody
    headers: Mapping[str, str]
    prefill: Instance | None
    decode: Instance
    comments: Comments
    sequential: bool = False

    @property
    def mode(self) -> Mode:
        """How this attempt goes about it."""
        if self.prefill is None:
            return "alone"
        return self.prefill.dispatch(self.sequential)


class Dispatcher:
    """Sends attempts. Each has an id of its own, so that nothing of an earlier one can be taken for it."""

    def __init__(self, engines: Engines, introductions: Introductions) -> None:
        self._engines = engines
        self._introductions = introductions

    async def send(self, attempt: Attempt) -> Answer:
        """As far as D's first token. Raises ``AttemptFailedError``; cancelled, it leaves neither leg behind."""
        request_id = str(uuid.uuid4())
        match attempt.mode:
            case "concurrent":
                return await self._concurrently(attempt, request_id)
            case "sequential":
                return await self._sequentially(attempt, request_id)
            case "alone":
                return await self._alone(attempt, request_id)

    async def _concurrently(self, attempt: Attempt, request_id: str) -> Answer:
        assert attempt.prefill is not None
        assert attempt.prefill.identity is not None
        params = attempt.prefill.identity.to_decode(attempt.body.remote_request_id(request_id))
        prefill = asyncio.create_task(self._prefill(attempt, attempt.prefill, request_id))
        _count_work(attempt.prefill, attempt.body.prompt_tokens, prefill)
        decode = asyncio.create_task(self._decode(attempt, request_id, params))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                refusal = self._judge(attempt.prefill, prefill)
                if refusal is not None:
                    await _end(decode)
                    return Answer(refusal)
                await asyncio.wait((decode,))
            return Answer(self._first(attempt, attempt.prefill, prefill, decode), prefill)
        except BaseException:  # the client's going, too, is to end both legs
            await _end(prefill, decode)
            raise

    def _judge(self, instance: Instance, prefill: asyncio.Task[Whole]) -> Whole | None:
        """What P's answer means while D waits: None to wait on, or what the client gets."""
        try:
            answer = prefill.result()
        except LegFailedError as failure:
            raise AttemptFailedError(failure, frozenset({instance})) from failure
        if answer.status != 200:
            return answer
        told, params = instance.identity, transfer_params(answer.body)
        self._introductions.learn(instance, params)
        if params is None:
            raise AttemptFailedError(_without_params(instance), frozenset({instance}))
        if instance.identity != told:
            changed = LegFailedError(instance, "restarted", f"is no longer {told}")
            raise AttemptFailedError(changed, frozenset())
        return None

    @staticmethod
    def _first(
        attempt: Attempt, instance: Instance, prefill: asyncio.Task[Whole], decode: asyncio.Task[Whole | Stream]
    ) -> Whole | Stream:
        """D's answer. While P has not done its part, D's failure may as well be P's."""
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
        if not attempt.sequential:
            self._introductions.learn(attempt.prefill, params)
        if params is None:
            raise AttemptFailedError(_without_params(attempt.prefill), frozenset({attempt.prefill}))
        return await self._decoded(attempt, request_id, params)

    async def _alone(self, attempt: Attempt, request_id: str) -> Answer:
        return await self._decoded(attempt, request_id, None)

    async def _decoded(self, attempt: Attempt, request_id: str, params: msgspec.Raw | None) -> Answer:
        try:
            return Answer(await self._decode(attempt, request_id, params))
        except LegFailedError as failure:
            raise AttemptFailedError(failure, frozenset({attempt.decode})) from failure

    async def _prefill(self, attempt: Attempt, instance: Instance, request_id: str) -> Whole:
        body = attempt.body
        return await self._engines.prefill(
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
    """From now on, although the leg has not begun yet: the next request is to see it."""
    work = contextlib.ExitStack()
    work.enter_context(instance.working(tokens))
    leg.add_done_callback(lambda _: work.close())


async def _end(*legs: asyncio.Task[Whole] | asyncio.Task[Whole | Stream]) -> None:
    """Cancel, and see to it that nothing is left open."""
    for leg in legs:
        leg.cancel()
    for ended in await asyncio.gather(*legs, return_exceptions=True):
        if isinstance(ended, Stream):
            ended.close()


def _without_params(instance: Instance) -> LegFailedError:
    return LegFailedError(
        instance, "no_params", "answered without kv_transfer_params: it has no KV connector that pushes"
    )
