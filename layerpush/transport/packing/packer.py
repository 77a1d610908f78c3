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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from layerpush.core.layout import CacheLayout, descriptor_ids, descriptor_offsets
from layerpush.core.push_protocol import Write
from layerpush.core.wire import Part, Unpack, Window, encode
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import DescriptorIds, Route, Transport, TransportError, WriteHandle, WriteState
from layerpush.transport.packing.cost_model import Plan
from layerpush.transport.packing.memory import PIECE_BYTES, Copies, Staging, whole_pieces
from layerpush.transport.packing.ring import Ring
from layerpush.transport.packing.runs import slots_of

logger = logging.getLogger("vllm.layerpush.packer")

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


@dataclass(slots=True, eq=False)
class StagedWrite:
    """One WRITE through staging memory; it serves as its own handle.

    ``ours`` is the offset of its span in our ring, ``theirs`` in ``window``; None if it has none. In seconds of the
    packer's clock: ``asked_at``, the first ``Unpack``, and ``ask_at``, the time for the next.
    """

    number: int
    plan: Plan
    route: Route
    local: DescriptorIds
    remote: DescriptorIds
    record: WriteRecord
    ours: int | None
    theirs: int | None = None
    window: PushWindow | None = None
    parts: tuple[Part, ...] = ()
    copies: Copies = field(default_factory=Copies)
    stage: Stage = Stage.GATHERING
    handle: WriteHandle | None = None
    began_at: float = 0.0
    asked_at: float | None = None
    ask_at: float = 0.0
    refused: bool = False
    halted: bool = False


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
        self._transport = transport
        self._layout = layout
        self._staging = staging
        self.block_bytes = block_bytes
        self._clock = clock
        self._expand = lru_cache(maxsize=64)(layout.expand)
        self._numbers = 0
        self._unpacking: dict[int, StagedWrite] = {}

    def gather(self, write: Write, route: Route, remote: DescriptorIds, record: WriteRecord) -> StagedWrite | None:
        """Begin a gathered WRITE of ``write`` to ``remote``, the decode engine's blocks; None if there is no room."""
        size = len(remote) * self.block_bytes
        span = self._staging.ring.take(size, self.block_bytes)
        if span is None:
            return None
        first = span // self.block_bytes
        local = np.arange(first, first + len(remote), dtype=np.int32)
        return self._begin(StagedWrite(self._number(), Plan.GATHERED, route, local, remote, record, span), write)

    def pack(self, write: Write, window: PushWindow, size: int, record: WriteRecord) -> StagedWrite | None:
        """Begin a packed WRITE of ``write``, ``size`` bytes, to a window; None if there is no room."""
        held = whole_pieces(size)
        theirs = window.spans.take(held, PIECE_BYTES)
        if theirs is None:
            return None
        ours = self._staging.ring.take(held, PIECE_BYTES)
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
        staged = StagedWrite(
            self._number(), Plan.PACKED, window.route, local, remote, record, ours, theirs, window, parts
        )
        return self._begin(staged, write)

    def unpacked(self, agent: str, number: int, done: bool) -> StagedWrite | None:
        """A decode rank has answered ``Unpack`` ``number``. Returns the WRITE that is over by this, else None."""
        staged = self._unpacking.get(number)
        if staged is None or staged.route.agent != agent:
            return None
        del self._unpacking[number]
        staged.stage, staged.refused = Stage.OVER, not done
        return staged

    def poll(self, staged: StagedWrite) -> WriteState:
        """Continue a WRITE, and return its state. Raises ``TransportError`` as a transport does."""
        self._post_if_gathered(staged)
        if staged.stage is Stage.WRITING:
            state = self._transport.poll(staged.handle)
            if state is not WriteState.LANDED:
                return state
            self._wrote(staged)
        if staged.stage is Stage.UNPACKING and self._clock() >= staged.ask_at:
            self._ask(staged)
        if staged.refused:
            raise TransportError("the decode engine did not unpack what it was sent")
        return WriteState.LANDED if staged.stage is Stage.OVER else WriteState.PENDING

    def halt(self, staged: StagedWrite) -> None:
        """The push has ended: a WRITE that is not on the wire yet will not be posted."""
        staged.halted = staged.stage is Stage.GATHERING

    def release(self, staged: StagedWrite) -> None:
        """Forget a WRITE that has ended, and free its spans. Raises ``TransportError`` if it cannot be released yet."""
        if staged.handle is not None:
            self._transport.release(staged.handle)
            staged.handle = None
        self._unpacking.pop(staged.number, None)
        self._free(staged)
        if staged.theirs is not None and staged.window is not None:
            staged.window.spans.give(staged.theirs)
            staged.theirs = None

    def _begin(self, staged: StagedWrite, write: Write) -> StagedWrite:
        assert staged.ours is not None
        offset, staged.began_at = staged.ours, time.perf_counter()
        for part in write.segments:
            blocks = self._expand(part.source)
            staged.copies.begin(partial(self._staging.gather, part.layers, blocks, offset))
            offset += len(blocks) * len(slots_of(self._layout, part.layers)) * self.block_bytes
        try:
            self._post_if_gathered(staged)  # a copy on a CPU is over already: post it now
        except BaseException:  # nobody else can free the span
            self.release(staged)
            raise
        return staged

    def _post_if_gathered(self, staged: StagedWrite) -> None:
        """Raises ``TransportError``, and only when no copy runs any more."""
        if staged.stage is not Stage.GATHERING or not staged.copies.are_over():
            return
        if staged.halted:
            raise TransportError("the push ended before its blocks were written")
        if staged.copies.failure is not None:
            raise TransportError(f"blocks could not be gathered: {staged.copies.failure}")
        staged.record.t_post = time.perf_counter()
        staged.handle = self._transport.post_write(staged.route, staged.local, staged.remote)
        staged.record.t_posted = time.perf_counter()
        staged.stage = Stage.WRITING

    def _wrote(self, staged: StagedWrite) -> None:
        if staged.plan is Plan.PACKED:
            staged.stage = Stage.UNPACKING
            self._unpacking[staged.number] = staged
        else:
            staged.stage = Stage.OVER
        self._free(staged)

    def _ask(self, staged: StagedWrite) -> None:
        """Send ``Unpack``, again every second: an answer may be lost, and only a send detects a dead decode engine."""
        assert staged.window is not None
        assert staged.theirs is not None
        now = self._clock()
        staged.asked_at = staged.asked_at or now
        staged.ask_at = now + UNPACK_RETRY_S
        offset = staged.window.offer.offset + staged.theirs
        message = Unpack(staged.window.request_id, staged.number, offset, staged.parts)
        self._transport.notify(staged.route.agent, encode(message))

    def _free(self, staged: StagedWrite) -> None:
        """Free our own span."""
        if staged.ours is not None:
            self._staging.ring.give(staged.ours)
            staged.ours = None

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def gathered_targets(layout: CacheLayout, write: Write, region_blocks: Sequence[int]) -> DescriptorIds:
    """Descriptor ids of ``write`` on the decode engine, in packed order."""
    offsets = descriptor_offsets(region_blocks)
    ids = [
        descriptor_ids(offsets, slots_of(layout, part.layers), layout.expand(part.target)) for part in write.segments
    ]
    return np.concatenate(ids)
