"""WRITEs on the wire: posts them, polls them, gives their handles back. Writer thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from layerpush.core.layout import CacheLayout
from layerpush.core.push_protocol import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import DescriptorIds, PeerLostError, Transport, TransportError, WriteHandle, WriteState
from layerpush.transport.link import DirectPlanner, Link
from layerpush.transport.packing.packer import PushWindow, StagedWrite
from layerpush.transport.packing.strategy import PackingStrategy

logger = logging.getLogger("vllm.layerpush.outbox")


@dataclass(slots=True)
class RankWrite:
    """One posted WRITE to one decode rank."""

    handle: WriteHandle
    record: WriteRecord
    staged: StagedWrite | None = None


@dataclass(slots=True)
class PostedWrite:
    """A session's WRITE: over when every rank's part has ended, landed only if none of them was ``lost``."""

    id: int
    parts: list[RankWrite]
    lost: str | None = None
    peer_lost: bool = False


class Outbox:
    def __init__(self, transport: Transport, layout: CacheLayout, strategy: PackingStrategy | None = None) -> None:
        self._transport = transport
        self._strategy = strategy
        self._planner = DirectPlanner(layout)
        self._unreleased: list[RankWrite] = []
        self._next_release = 0.0

    @property
    def has_leftovers(self) -> bool:
        """Whether handles of ended WRITEs wait for another try at releasing them."""
        return bool(self._unreleased)

    def post(self, write: Write, link: Link, window: PushWindow | None = None) -> PostedWrite:
        """Post ``write`` to every rank of ``link``. What cannot be posted makes it ``lost``; nothing is raised."""
        posted = PostedWrite(write.id, [])
        try:
            local, remote = self._planner.descriptors(write, link)
            for route in link.routes if len(local) else ():
                record = _record(write, route.remote_rank, len(local), int(write.size * link.share))
                staged = self._stage(write, link, window, (local, remote), record)
                if staged is not None:
                    posted.parts.append(RankWrite(staged, record, staged))
                    continue
                handle = self._transport.post_write(route, local, remote)
                record.t_posted = time.perf_counter()
                posted.parts.append(RankWrite(handle, record))
        except Exception as error:  # noqa: BLE001  whatever went wrong, the session must hear that this WRITE is lost
            posted.lost = f"a WRITE could not be posted: {error}"
            posted.peer_lost = isinstance(error, PeerLostError)
        return posted

    def poll(self, write: PostedWrite, on_end: Callable[[RankWrite, bool], None] | None = None) -> bool:
        """Make progress; True when the WRITE has ended. ``on_end(part, landed)`` sees each handle before it goes."""
        ended: list[tuple[RankWrite, bool]] = []
        pending = []
        for part in write.parts:
            state, reason = self._state_of(write, part)
            if state is WriteState.PENDING:
                pending.append(part)
                continue
            if state is WriteState.LANDED:
                part.record.t_landed = time.perf_counter()
                if part.staged is not None and self._strategy is not None:
                    self._strategy.learn(part.staged)
            else:
                write.lost = write.lost or reason
            ended.append((part, state is WriteState.LANDED))
        write.parts = pending
        for part, landed in ended:
            if on_end is not None:
                on_end(part, landed)
            self.release(part)
        return not pending

    def halt(self, write: PostedWrite) -> None:
        """Its push has ended: what is not on the wire yet need not be."""
        for part in write.parts:
            if part.staged is not None and self._strategy is not None:
                self._strategy.packer.halt(part.staged)

    def release(self, part: RankWrite) -> None:
        if not self._released(part):
            self._unreleased.append(part)

    def release_leftovers(self, now: float, every: float) -> None:
        """Try again, at most ``every`` so many seconds, to give back what could not be given back."""
        if self._unreleased and now >= self._next_release:
            self._next_release = now + every
            self._unreleased = [part for part in self._unreleased if not self._released(part)]

    def _state_of(self, write: PostedWrite, part: RankWrite) -> tuple[WriteState, str]:
        try:
            return self._poll(part), "a WRITE ended in an error"
        except TransportError as error:
            write.peer_lost |= isinstance(error, PeerLostError)
            return WriteState.FAILED, str(error)

    def _released(self, part: RankWrite) -> bool:
        try:
            self._give_back(part)
        except TransportError as error:
            logger.warning("a WRITE's handle is kept until it can be released: %s", error)
            return False
        return True

    def _stage(
        self,
        write: Write,
        link: Link,
        window: PushWindow | None,
        pairs: tuple[DescriptorIds, DescriptorIds],
        record: WriteRecord,
    ) -> StagedWrite | None:
        if self._strategy is None or (link.gathered is None and window is None):
            return None
        return self._strategy.begin(write, link, window, pairs, record)

    def _poll(self, part: RankWrite) -> WriteState:
        if part.staged is None or self._strategy is None:
            return self._transport.poll(part.handle)
        return self._strategy.packer.poll(part.staged)

    def _give_back(self, part: RankWrite) -> None:
        if part.staged is None or self._strategy is None:
            self._transport.release(part.handle)
        else:
            self._strategy.packer.release(part.staged)


def _record(write: Write, rank: int, descriptors: int, size: int) -> WriteRecord:
    layers = [part.layers for part in write.segments]
    now = time.perf_counter()
    return WriteRecord(
        remote_rank=rank,
        layers=(min(part.start for part in layers), max(part.stop for part in layers) - 1),
        chunks=(write.chunk, write.chunk),
        descriptors=descriptors,
        bytes=size,
        t_post=now,
        t_posted=now,
    )
