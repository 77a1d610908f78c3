"""Runs WRITEs through staging memory: gathers blocks into our ring. The decode engine scatters a packed WRITE.

    gathered:  gather -> WRITE -> over
    packed:    gather -> WRITE -> Unpack -> Unpacked -> over

Writer thread only. A span of our ring is freed only when nothing reads it. A span of the decode engine's window is
freed only when nothing can write or read it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from layerpush.core.layout import CacheLayout
from layerpush.core.wire import Part, Unpack, Window, encode
from layerpush.core.write import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import DescriptorIds, Route, Transport, TransportError, WriteState
from layerpush.transport.packing.cost_model import Plan
from layerpush.transport.packing.memory import PIECE_BYTES, Copies, Staging, whole_pieces
from layerpush.transport.packing.ring import Ring
from layerpush.transport.packing.runs import slots_of
from layerpush.transport.writes import Transfer

logger = logging.getLogger(f"vllm.{__name__}")

UNPACK_RETRY_S = 1.0


class Stage(enum.Enum):
    GATHERING = "blocks are copied into our ring"
    WRITING = "on the wire"
    UNPACKING = "in the decode engine's ring, on the way into its cache"
    OVER = "nothing is left to do"


@dataclass(slots=True)
class PushWindow:
    """A decode engine's window for one request, its spans in use, and the route to its ring."""

    offer: Window
    route: Route
    request_id: str
    spans: Ring = field(init=False)

    def __post_init__(self) -> None:
        self.spans = Ring(self.offer.size)


@dataclass(slots=True, eq=False, kw_only=True)
class StagedWrite(Transfer):
    """One WRITE through staging memory. ``ours`` and ``theirs`` are the spans that it holds; ``handle`` is None unless
    it is on the wire. Once it has landed ``on_landed`` is called with it.
    """

    needs_polling: ClassVar[bool] = True

    packer: Packer
    number: int
    plan: Plan
    route: Route
    local: DescriptorIds
    remote: DescriptorIds
    ours: int | None
    theirs: int | None = None
    window: PushWindow | None = None
    parts: tuple[Part, ...] = ()
    copies: Copies = field(default_factory=Copies)
    stage: Stage = Stage.GATHERING
    begin_s: float = 0.0
    asked_at: float | None = None
    ask_at: float = 0.0
    refused: bool = False
    on_landed: Callable[[StagedWrite], None] | None = None

    @property
    def copy_s(self) -> float:
        """Seconds for the copies into our ring, without the wait for the device and for the writer's next turn."""
        return self.begin_s + self.copies.device_s

    def poll(self) -> WriteState:
        """Make progress. Raises ``TransportError`` as a transport does."""
        self._post_if_gathered()
        if self.stage is Stage.WRITING:
            state = self.transport.poll(self.handle)
            if state is not WriteState.LANDED:
                return state
            self._wrote()
        if self.stage is Stage.UNPACKING and self.packer.clock() >= self.ask_at:
            self._ask()
        if self.refused:
            raise TransportError("the decode engine did not unpack the blocks of a WRITE")
        if self.stage is not Stage.OVER:
            return WriteState.PENDING
        if self.on_landed is not None:
            self.on_landed(self)
        return WriteState.LANDED

    def halt(self) -> None:
        """The push has ended: a WRITE that is not on the wire yet will not be posted."""
        self.halted = self.stage is Stage.GATHERING

    def release(self) -> None:
        """Forget a WRITE that has ended, and free its spans. Raises ``TransportError`` if that must wait."""
        if self.handle is not None:
            self.transport.release(self.handle)
            self.handle = None
        self.packer.unpacking.pop(self.number, None)
        self._free()
        if self.theirs is not None and self.window is not None:
            self.window.spans.give(self.theirs)
            self.theirs = None

    def begin(self, write: Write) -> StagedWrite | None:
        """Start the copies into our ring. None if none could be started: then nothing is held, and the WRITE may go
        directly.
        """
        assert self.ours is not None
        packer, offset = self.packer, self.ours
        began_at = time.perf_counter()
        for part in write.segments:
            blocks = packer.expand(part.source)
            self.copies.begin(partial(packer.staging.gather, part.layers, blocks, offset))
            offset += len(blocks) * len(slots_of(packer.layout, part.layers)) * packer.block_bytes
        self.begin_s = time.perf_counter() - began_at
        if self.copies.failure is not None and not self.copies.have_begun:
            packer.log_refusal(self.copies.failure)
            self.release()
            return None
        try:
            self._post_if_gathered()  # on a CPU the copies are over, and the writer's next turn may be late
        except BaseException:  # no caller would give the ring's span back
            self.release()
            raise
        return self

    def _post_if_gathered(self) -> None:
        """Post the WRITE after its last copy. Raises ``TransportError`` only when no copy runs any more."""
        if self.stage is not Stage.GATHERING or not self.copies.are_over():
            return
        if self.halted:
            raise TransportError("the push ended before its blocks were written")
        if self.copies.failure is not None:
            raise TransportError(f"blocks could not be gathered: {self.copies.failure}")
        self.record.t_post = time.perf_counter()
        self.handle = self.transport.post_write(self.route, self.local, self.remote)
        self.record.t_posted = time.perf_counter()
        self.stage = Stage.WRITING

    def _wrote(self) -> None:
        if self.plan is Plan.PACKED:
            self.stage = Stage.UNPACKING
            self.packer.unpacking[self.number] = self
        else:
            self.stage = Stage.OVER
        self._free()

    def _ask(self) -> None:
        """Ask the decode engine to unpack, again every second: an answer may be lost, and only a send shows that the
        engine has died.
        """
        assert self.window is not None
        assert self.theirs is not None
        now = self.packer.clock()
        self.asked_at = self.asked_at or now
        self.ask_at = now + UNPACK_RETRY_S
        offset = self.window.offer.offset + self.theirs
        message = Unpack(self.window.request_id, self.number, offset, self.parts)
        self.transport.notify(self.route.agent, encode(message))

    def _free(self) -> None:
        """Give our own span back."""
        if self.ours is not None:
            self.packer.staging.ring.give(self.ours)
            self.ours = None


class Packer:
    """``block_bytes`` is the size of a kernel block, the same in every region. ``clock`` returns seconds."""

    def __init__(
        self,
        transport: Transport,
        layout: CacheLayout,
        staging: Staging,
        block_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.transport = transport
        self.layout = layout
        self.staging = staging
        self.block_bytes = block_bytes
        self.clock = clock
        self.expand = lru_cache(maxsize=64)(layout.expand)
        self._numbers = 0
        self._refusal = ""
        self.unpacking: dict[int, StagedWrite] = {}

    def gather(self, write: Write, route: Route, remote: DescriptorIds, record: WriteRecord) -> StagedWrite | None:
        """Begin a gathered WRITE of ``write`` to ``remote``, the decode engine's blocks. None: it cannot be begun now,
        for lack of room or because the device refuses the copy.
        """
        size = len(remote) * self.block_bytes
        span = self.staging.ring.take(size, self.block_bytes)
        if span is None:
            return None
        first = span // self.block_bytes
        local = np.arange(first, first + len(remote), dtype=np.int32)
        return self._staged(Plan.GATHERED, record, route=route, local=local, remote=remote, ours=span).begin(write)

    def pack(self, write: Write, window: PushWindow, size: int, record: WriteRecord) -> StagedWrite | None:
        """Begin a packed WRITE of ``write``, ``size`` bytes, to a window. None: as ``gather``."""
        held = whole_pieces(size)
        theirs = window.spans.take(held, PIECE_BYTES)
        if theirs is None:
            return None
        ours = self.staging.ring.take(held, PIECE_BYTES)
        if ours is None:
            window.spans.give(theirs)
            return None
        count = held // PIECE_BYTES
        local = ours // PIECE_BYTES + np.arange(count, dtype=np.int32)
        remote = (window.offer.offset + theirs) // PIECE_BYTES + np.arange(count, dtype=np.int32)
        parts = tuple(
            Part(part.layers.start, part.layers.stop, part.group, part.first - part.skipped, part.end - part.skipped)
            for part in write.segments
        )
        return self._staged(
            Plan.PACKED,
            record,
            route=window.route,
            local=local,
            remote=remote,
            ours=ours,
            theirs=theirs,
            window=window,
            parts=parts,
        ).begin(write)

    def unpacked(self, agent: str, number: int, done: bool) -> StagedWrite | None:
        """A decode rank frees a span of its window. Returns the WRITE that this completes, if any."""
        staged = self.unpacking.get(number)
        if staged is None or staged.route.agent != agent:
            return None
        del self.unpacking[number]
        staged.stage, staged.refused = Stage.OVER, not done
        return staged

    def log_refusal(self, reason: str) -> None:
        """The device did not begin a copy: log the reason, unless it is the same as the last time."""
        if reason != self._refusal:
            logger.warning("layerpush: WRITEs go directly, because no copy into staging memory can begin: %s", reason)
        self._refusal = reason

    def _staged(self, plan: Plan, record: WriteRecord, **details: Any) -> StagedWrite:
        self._numbers += 1
        return StagedWrite(
            transport=self.transport,
            record=record,
            handle=None,
            packer=self,
            number=self._numbers,
            plan=plan,
            **details,
        )
