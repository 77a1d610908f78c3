"""The requests that have come to a prefill engine, as one of its workers knows them. Pure; one thread.

The scheduler names a request in the first step after it came, although the request may wait in the queue for a long
time. So a worker can distinguish a request that waits from one that never came. A request that is over is remembered
for a while: a decode engine may register it late.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from layerpush.core.bounded_index import BoundedIndex
from layerpush.core.prefixes import Prefixes
from layerpush.core.request_names import Arrived

KEPT = 1 << 16
KEPT_BYTES = 128 << 20
ENDED_KEPT = 1 << 16
ENDED_BYTES = 64 << 20
ENDED_S = 60.0
ELSEWHERE_S = 10.0
"""Seconds for which it is known that a request went to another rank. The next attempt may come to this one."""
IDLE_S = 1.0
"""Seconds without a step after which an engine is idle. An idle engine begins a step for every request that comes."""


class PromptState(enum.Enum):
    QUEUED = "it has come"
    RUNNING = "its prefill has begun"
    ENDED = "it is over"
    ELSEWHERE = "it went to another data-parallel rank"


@dataclass(slots=True)
class PromptRequest:
    """A request of this engine. ``failure``: why no decode engine will get it, if it is over and none has.

    It needs no table of transitions: one method of ``PromptRequests`` sets each state, whatever the state before. But a
    request that is not over does not go ``ELSEWHERE``.
    """

    request_id: str
    transfer_id: str | None = None
    prompt_digest: str | None = None
    prefixes: Prefixes | None = None
    state: PromptState = PromptState.QUEUED
    failure: str | None = None
    renewed: tuple[str, ...] = ()
    """Those of its keys under which a later request may come, or has begun: its failure says nothing about that one."""


class PromptRequests:
    """Bounded by state in number, bytes and time. ``keys_of`` gives a request's keys: see ``Pairing``. Times are the
    caller's clock.
    """

    def __init__(self, keys_of: Callable[[PromptRequest], list[str]]) -> None:
        self._keys_of = keys_of
        self._live = BoundedIndex[PromptRequest](KEPT, KEPT_BYTES)
        self._ended = BoundedIndex[PromptRequest](ENDED_KEPT, ENDED_BYTES, ENDED_S)
        self._elsewhere = BoundedIndex[PromptRequest](ENDED_KEPT, ENDED_BYTES, ELSEWHERE_S)
        self._begun = 0
        self._last_two: deque[float] = deque((float("-inf"),) * 2, maxlen=2)
        self._idle_since = float("inf")

    def __iter__(self) -> Iterator[PromptRequest]:
        """Those that are not over, oldest first."""
        return iter(self._live)

    def get(self, request_id: str) -> PromptRequest:
        """A request, or a new one that is not kept."""
        found = (each for index in self._indices for each in index.find([(request_id,)]))
        return next(found, None) or PromptRequest(request_id)

    def request_arrived(self, request: Arrived) -> PromptRequest:
        """The scheduler has this request."""
        prompt = PromptRequest(request.request_id, request.transfer_id, request.prompt_digest, request.prefixes)
        self._keep(self._live, prompt)
        return prompt

    def request_began(self, request_id: str) -> PromptRequest:
        """A request's prefill has begun. Failures of earlier ones with its keys do not count any more."""
        prompt = self.get(request_id)
        keys = self._keys_of(prompt)
        for over in (*self._ended.find(keys), *self._elsewhere.find(keys)):
            over.renewed = tuple({*over.renewed, *keys} & {*self._keys_of(over)})
        if prompt.state is not PromptState.RUNNING:
            prompt.state, prompt.failure = PromptState.RUNNING, None
            self._keep(self._live, prompt)
        return prompt

    def request_answered(self, prompt: PromptRequest) -> None:
        """A decode engine's request has a request of this engine, or its failure. The next one of its name is for a
        later request: a router may try again with the same id.
        """
        prompt.renewed = tuple(self._keys_of(prompt))

    def request_ended(self, prompt: PromptRequest, failure: str | None, now: float) -> None:
        """A request is over."""
        prompt.state, prompt.failure = PromptState.ENDED, failure or prompt.failure
        prompt.prompt_digest = prompt.prefixes = None
        self._keep(self._ended, prompt, now)

    def rank_is_other(self, prompt: PromptRequest, failure: str, now: float) -> None:
        """A request went to another rank."""
        if (prompt.request_id,) not in self._live:
            prompt.state, prompt.failure = PromptState.ELSEWHERE, failure
            self._keep(self._elsewhere, prompt, now)

    def live(self, keys: Iterable[str]) -> list[PromptRequest]:
        """The requests that are not over and have any of these keys, oldest first."""
        return self._live.find(keys)

    def begun_or_ended(self, keys: Iterable[str]) -> list[PromptRequest]:
        """The requests with any of these keys that have begun here, or have ended a short while ago."""
        keys = list(keys)
        return [each for each in self._live.find(keys) if each.state is PromptState.RUNNING] + self._ended.find(keys)

    def take_failure(self, keys: Iterable[str], now: float) -> str | None:
        """Why a request that is known by one of these keys failed, unless it came again. The first key counts first,
        and the newest of its requests. A request's failure is taken once.
        """
        for key in keys:
            over = self.over([key], now)
            failed = [each for each in over if each.failure is not None and key not in each.renewed]
            if failed and key not in self._live:
                for each in over:
                    self.request_answered(each)
                return failed[-1].failure
        return None

    def over(self, keys: Iterable[str], now: float) -> list[PromptRequest]:
        """The requests with any of these keys that have ended here a short while ago, or went to another rank."""
        keys = list(keys)
        return [*self._ended.find(keys, now), *self._elsewhere.find(keys, now)]

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        self._ended.expire(now)
        self._elsewhere.expire(now)

    # Whether a request that is not here may still come.

    def count_steps(self, begun: int, running: bool, now: float) -> None:
        """``begun`` steps have begun, and the last one may be ``running``. Call it often, after ``request_arrived``."""
        for _ in range(min(begun - self._begun, 2)):
            self._last_two.append(now)
        if running or begun != self._begun:
            self._idle_since = float("inf")
        elif self._idle_since == float("inf"):
            self._idle_since = now
        self._begun = begun

    def is_complete(self, since: float, now: float) -> bool:
        """Whether every request that had come to the engine at the time ``since`` has been noted.

        A step names the requests that came before it was scheduled, and the next step may be scheduled already. So two
        steps must have begun after ``since``, or the engine must be idle.
        """
        return now >= self._idle_since + IDLE_S or self._last_two[0] > since

    @property
    def _indices(self) -> tuple[BoundedIndex[PromptRequest], ...]:
        return self._live, self._ended, self._elsewhere

    def _keep(self, index: BoundedIndex[PromptRequest], prompt: PromptRequest, now: float = 0.0) -> None:
        for each in self._indices:
            each.drop([(prompt.request_id,)])
        index.add(prompt, [(prompt.request_id,), *self._keys_of(prompt)], now)
