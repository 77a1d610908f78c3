"""What is on the wire for a push, and what becomes of it: polls WRITEs and says it in a session's events."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from functools import partial

from layerpush.core.push_protocol import Delivered, Event, Landed, Lost
from layerpush.prefill.host import Host
from layerpush.prefill.push import Push
from layerpush.telemetry.counters import PushCounters
from layerpush.transport.writes import Outbox, PostedWrite, RankWrite

logger = logging.getLogger("vllm.layerpush.writer")


class Flight:
    """Writer thread only. A WRITE that is on the wire for more than ``write_timeout_s`` seconds is overdue."""

    def __init__(self, outbox: Outbox, host: Host, counters: PushCounters, write_timeout_s: float = math.inf) -> None:
        self._outbox = outbox
        self._host = host
        self._counters = counters
        self._write_timeout_s = write_timeout_s

    def poll(self, push: Push) -> Iterator[Event]:
        """Make progress on every WRITE of a push. Each event must be handled before the next is asked for."""
        for write in list(push.writes):
            if push.session.failure is not None:
                self._outbox.halt(write)
            if self._outbox.poll(write, partial(self._part_ended, push)):
                push.writes.remove(write)
                push.ended(time.perf_counter())
                yield self.ended(push, write)
        delegated = push.delegated
        if delegated is not None and self._outbox.poll(delegated, partial(self._delegated_ended, push, delegated)):
            push.delegated = None
            push.ended(time.perf_counter())
            self._note_loss(push, delegated)
            if push.retraction is not None:
                self._host.retract(push.retraction, withdrawn=push.withdrawn)
            yield Delivered(delegated.lost)

    def ended(self, push: Push, write: PostedWrite) -> Event:
        """What the end of a WRITE means to its session."""
        self._note_loss(push, write)
        if write.lost is None:
            return Landed(write.id)
        level = logging.ERROR if push.session.failure is None else logging.DEBUG  # the first one says it
        decode_id = push.record.decode_request_id
        logger.log(
            level,
            "push of %s to %s failed: %s; its completion will not be sent",
            push.request_id,
            decode_id,
            write.lost,
        )
        return Lost(write.id, write.lost)

    def overdue(self, push: Push) -> str | None:
        """Why a push must end, if one of its WRITEs is overdue; said once."""
        posted = min((part.record.t_posted for part in push.parts), default=math.inf)
        if push.overdue or time.perf_counter() - posted < self._write_timeout_s:
            return None
        push.overdue = True
        return f"a WRITE is on the wire for more than {self._write_timeout_s:g} s (write_timeout_s)"

    def _note_loss(self, push: Push, write: PostedWrite) -> None:
        if write.peer_lost and push.record.decode_engine_id is not None:
            self._host.peer_lost(push.record.decode_engine_id)

    def _delegated_ended(self, push: Push, write: PostedWrite, part: RankWrite, landed: bool) -> None:
        if not landed:
            decode_id, why = push.record.decode_request_id, write.lost
            logger.error("whole-request push of %s to %s failed: %s", push.request_id, decode_id, why)
        self._host.delegated_write_ended(push.request_id, part, landed)
        self._part_ended(push, part, landed, whole=True)

    def _part_ended(self, push: Push, part: RankWrite, landed: bool, *, whole: bool = False) -> None:
        if landed:
            push.record.t_last_landed = part.record.t_landed
            self._counters.landed(part.record, part.record.plan, whole=whole)
        elif part.staged is None or not part.staged.halted:
            self._counters.lost()
