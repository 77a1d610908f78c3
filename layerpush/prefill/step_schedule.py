"""Decides when the ready layers of the running step leave for each decode engine, and when it polls their WRITEs.

``write_schedule`` has the rule. Its numbers come from here: a layer's time from the steps (``LayerInterval``), a
link's from WRITEs that landed (``LinkSpeed``), bytes from the sessions. All prompts of a step that go to one decode
engine share its link, so they wait, and leave, together.

``decide`` is called in each turn of the writer. Writer thread only. Times are seconds of ``time.perf_counter``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from layerpush.core.push_mode import PushMode
from layerpush.prefill.layer_interval import LayerInterval
from layerpush.prefill.write_schedule import SAFETY, Progress, Speeds, layers_to_wait
from layerpush.transport.link import Link
from layerpush.transport.link_speed import LinkSpeed

if TYPE_CHECKING:
    from layerpush.prefill.push import Push

FRESH_S = 1.0
"""Seconds after a WRITE has landed for which its link needs no probe."""


class StepSchedule:
    """See the module's text. ``layers`` is the number of the model's layers."""

    def __init__(self, layers: int, interval: LayerInterval) -> None:
        self._layers = self._hooked = layers
        self._interval = interval
        self._leave_at: dict[str, float] = {}
        self._scheduled: list[LinkSpeed] = []

    def step_ended(self, hooked: int) -> None:
        """A step has ended; hooks have reported ``hooked`` of its layers. In the next step ready layers do not wait for
        the others, which the sweep finds after the step.
        """
        if hooked:
            self._hooked = hooked

    def decide(self, pushes: Iterable[Push], step: set[str], ready: int, now: float) -> None:
        """Decide for each decode engine whether ready layers wait.

        ``step`` holds the request ids of the running step; ``ready`` is the number of its layers that are in memory.
        """
        self._leave_at, self._scheduled = {}, []
        if not step or ready >= self._hooked:
            return
        by_engine: dict[str, tuple[Link, list[Push]]] = {}
        for push in pushes:
            if push.is_streaming and push.link is not None:
                by_engine.setdefault(push.link.engine_id, (push.link, []))[1].append(push)
        for link, sharing in by_engine.values():
            running = [push for push in sharing if push.request_id in step]
            if running and all(push.mode is PushMode.AUTO for push in running):
                self._decide(link, sharing, running, ready, now)

    def waits(self, push: Push) -> bool:
        """Whether ready layers of the push wait for more. A chunk that is ready in all its layers does not."""
        return push.link is not None and push.link.engine_id in self._leave_at

    @property
    def leave_at(self) -> float | None:
        """The expected time at which the first of the waiting layers leave; None if none wait."""
        return min(self._leave_at.values(), default=None)

    def next_due(self, now: float) -> float:
        """When the writer should poll WRITEs of the running step; infinite if it need not.

        Only an early poll can show that a link is faster than it seems. So it polls more often while layers wait.
        """
        waiting = bool(self._leave_at)
        return min((speed.next_poll(now, halfway=waiting) for speed in self._scheduled), default=math.inf)

    def _decide(self, link: Link, sharing: list[Push], running: list[Push], ready: int, now: float) -> None:
        speed, layer_s = link.speed, self._interval.layer_s
        self._scheduled.append(speed)
        slowdown, (write_s, byte_s) = speed.slowdown(now), speed.line
        sessions = [push.session for push in running]
        progress = Progress(
            layers=self._hooked,
            ready=ready,
            writes=len(running),
            layer_bytes=sum(session.chunk_bytes for session in sessions) // self._layers,
            unposted_bytes=sum(push.session.unposted_bytes for push in sharing),
            busy_s=speed.busy_s(now, SAFETY),
            next_part=min(session.next_part for session in sessions),
            probed=speed.last_landed > now - FRESH_S or any(session.landed_bytes for session in sessions),
        )
        known = Speeds()
        if speed.is_known:
            known = Speeds(layer_s, slowdown * byte_s, slowdown * write_s, speed.proven_bytes)
        layers = layers_to_wait(known, progress)
        if layers and layer_s is not None:
            since = now if self._interval.last is None else self._interval.last
            self._leave_at[link.engine_id] = since + layers * layer_s
