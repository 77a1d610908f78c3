"""Pushes over a simulated link, decided by the product: its sessions, its schedule, its estimate of the link. Pure.

``SimulatedWriter`` plays the writer thread of one prefill rank. It tells the parts of a turn when a layer is ready and
when a WRITE has landed, and posts what they ask for. It takes no time itself, and sees each of these times at once.
WRITEs move one after the other. All times are simulated seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from layerpush.core.kv_kind import KvKind
from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import PromptProgress, whole_prompt
from layerpush.core.wire import Registration
from layerpush.core.write import Write
from layerpush.prefill.layer_interval import LayerInterval
from layerpush.prefill.push_protocol import (
    Connected,
    Event,
    Finished,
    Planned,
    Post,
    PostReady,
    Ready,
    Registered,
    WriteLanded,
)
from layerpush.prefill.push_session import PushSession
from layerpush.prefill.step_schedule import StepSchedule
from layerpush.transport.link import Link

REST_S = 60.0
"""Between two pushes of one writer."""


class Written(NamedTuple):
    """One WRITE: when it was posted and has landed, its blocks in all layers, its layers."""

    posted: float
    landed: float
    blocks: int
    layers: int


@dataclass
class SimulatedPush:
    """The course of one push. ``ready``: the time of each layer of each step."""

    began: float
    ready: list[float] = field(default_factory=list)
    writes: list[Written] = field(default_factory=list)
    idle_while_ready: int = 0
    """How often ready layers waited although the link was idle."""

    @property
    def prefill_s(self) -> float:
        return self.ready[-1] - self.began

    @property
    def exposed_s(self) -> float:
        return self.writes[-1].landed - self.ready[-1]


class SimulatedWriter:
    """``seconds`` of a WRITE on the wire, from its bytes and its blocks in all layers. ``kinds``: of each group of
    layers. ``groups``: of each layer, whose block on this rank has ``block_bytes``. The writer remembers the link from
    one push to the next.
    """

    def __init__(
        self,
        kinds: Sequence[KvKind],
        groups: Sequence[int],
        block_bytes: int,
        mode: PushMode,
        seconds: Callable[[int, int], float],
    ) -> None:
        self._kinds, self._mode, self._seconds = kinds, mode, seconds
        self._groups, self._bytes = groups, [block_bytes] * len(groups)
        self._interval = LayerInterval()
        self._schedule = StepSchedule(len(groups), self._interval)
        self.link = Link("D", (), ())
        self._now = 0.0

    def push(self, prompt: int, steps: Iterable[tuple[int, Iterable[float]]]) -> SimulatedPush:
        """Push a prompt of ``prompt`` tokens. A step has a number of tokens, and the seconds of each layer."""
        self._now += REST_S
        self._done, self._free = SimulatedPush(self._now), self._now
        self._in_flight: deque[tuple[float, Write]] = deque()
        size, total = self._kinds[0].block_tokens, -(-prompt // self._kinds[0].block_tokens)
        blocks = list(range(1, total + 1))
        wanted = [kind.blocks_between(blocks, kind.first_attended(prompt - 1), prompt) for kind in self._kinds]
        registration = Registered(
            Registration(
                request_id="request",
                decode_engine_id="D",
                decode_host="D",
                decode_port=1,
                decode_tp_size=1,
                local_block_ids=tuple(map(tuple, wanted)),
            )
        )
        self._session = PushSession("request", self._groups, self._bytes, self._mode)
        self._push: Any = SimpleNamespace(
            session=self._session, link=self.link, mode=self._mode, request_id="request", is_streaming=True
        )
        progress, tables = PromptProgress("request", (size,) * len(self._kinds)), [blocks] * len(self._kinds)
        computed = 0
        for tokens, layers in steps:
            chunk = progress.advance(computed, tokens, prompt, tables)
            assert chunk is not None
            computed = chunk.end
            self._handle(Planned(chunk))
            if chunk.index == 0 and self._mode is not PushMode.WHOLE:
                self._handle(registration)
                self._handle(Connected())
            self._interval.step_begins()
            for layer, layer_s in enumerate(layers):
                self._land(self._now + layer_s, layer)
                self._interval.layer_ready(self._now)
                self._done.ready.append(self._now)
                self._handle(Ready(chunk.epoch, chunk.index, layer))
                self._look(layer + 1)
        if self._mode is PushMode.WHOLE:
            self._handle(Finished(None))
            self._handle(registration)
            self._handle(Connected(whole=whole_prompt("request", 0, prompt, size, tables)))
            self._look(len(self._groups))
        while self._in_flight:
            self._land(self._in_flight[0][0], len(self._groups))
        return self._done

    def _handle(self, event: Event) -> list[Any]:
        return self._session.handle(event, self._now)

    def _land(self, until: float, ready: int) -> None:
        """WRITEs that land before ``until`` have landed; then it is ``until``."""
        while self._in_flight and self._in_flight[0][0] <= until:
            self._now, write = self._in_flight.popleft()
            self.link.speed.write_ended(write.id, self._now, landed=True)
            self._handle(WriteLanded(write.id))
            self._look(ready)
        self._now = until

    def _look(self, ready: int) -> None:
        """A turn of the writer. ``ready`` layers of the step are in memory."""
        if not self._session.accepts(PostReady):
            return
        self._schedule.decide([self._push], {"request"}, ready, self._now)
        waits = self._schedule.waits(self._push)
        self._done.idle_while_ready += waits and not self._in_flight and bool(self._session.ready_blocks.pending())
        for action in self._handle(PostReady(waits)):
            if isinstance(action, Post):
                self._post(action.write)

    def _post(self, write: Write) -> None:
        segments = [(part.layers.stop - part.layers.start, len(part.source)) for part in write.segments]
        blocks = sum(layers * count for layers, count in segments)
        began = max(self._now, self._free)
        self._free = began + self._seconds(write.size, blocks)
        self.link.speed.write_posted(write.id, write.size, self._now)
        self._in_flight.append((self._free, write))
        self._done.writes.append(Written(self._now, self._free, blocks, sum(layers for layers, _ in segments)))
