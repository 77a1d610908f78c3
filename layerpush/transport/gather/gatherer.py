"""Runs WRITEs through staging memory: gathers blocks into our ring, and writes them from there.

Writer thread only. A span of our ring is freed only when nothing reads it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from layerpush.core.layout import CacheLayout, kernel_ids
from layerpush.core.write import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import DescriptorIds, Route, Transport, TransportError, WriteState
from layerpush.transport.gather.memory import Copies, Staging, slots_of
from layerpush.transport.transfer import Transfer

logger = logging.getLogger(f"vllm.{__name__}")


class Stage(enum.Enum):
    GATHERING = "blocks are copied into our ring"
    WRITING = "on the wire"
    OVER = "nothing is left to do"


@dataclass(slots=True, eq=False, kw_only=True)
class StagedWrite(Transfer):
    """One WRITE from staging memory, from descriptors ``local`` to ``remote``. ``span`` is the offset of its bytes in
    the ring, None after they are given back; ``handle`` is None unless it is on the wire. ``expected_copy_s``: seconds
    that the copies are expected to take. Once it has landed ``on_landed`` is called with it.
    """

    needs_polling: ClassVar[bool] = True

    gatherer: Gatherer
    route: Route
    local: DescriptorIds
    remote: DescriptorIds
    span: int | None
    copies: Copies = field(default_factory=Copies)
    stage: Stage = Stage.GATHERING
    begin_s: float = 0.0
    expected_copy_s: float = 0.0
    on_landed: Callable[[StagedWrite], None] | None = None

    @property
    def on_wire_at(self) -> float:
        return self.record.t_post + (self.expected_copy_s if self.stage is Stage.GATHERING else 0.0)

    @property
    def copy_s(self) -> float:
        """Seconds for the copies into our ring, without the wait for the device and for the writer's next turn."""
        return self.begin_s + self.copies.device_s

    def poll(self) -> WriteState:
        """Make progress. Raises ``TransportError`` as a transport does."""
        self._post_if_gathered()
        if self.stage is Stage.GATHERING:
            return WriteState.PENDING
        if self.stage is Stage.WRITING:
            state = self.transport.poll(self.handle)
            if state is not WriteState.LANDED:
                return state
            self.stage = Stage.OVER
            self._free()
            if self.on_landed is not None:
                self.on_landed(self)
        return WriteState.LANDED

    def cancel_unposted(self) -> None:
        """The push has ended: a WRITE that is not on the wire yet will not be posted."""
        self.is_cancelled = self.stage is Stage.GATHERING

    def release(self) -> None:
        """Forget a WRITE that has ended, and free its span. Raises ``TransportError`` if that must wait."""
        if self.handle is not None:
            self.transport.release(self.handle)
            self.handle = None
        self._free()

    def begin(self, write: Write) -> StagedWrite | None:
        """Start the copies into our ring. None if none could be started: then nothing is held, and the WRITE may go
        directly.
        """
        assert self.span is not None
        gatherer, offset = self.gatherer, self.span
        began_at = time.perf_counter()
        for part in write.segments:
            blocks = kernel_ids(part.source, gatherer.layout.layers[part.layers][0].kernel_blocks)
            self.copies.begin(partial(gatherer.staging.gather, part.layers, blocks, offset))
            offset += len(blocks) * len(slots_of(gatherer.layout, part.layers)) * gatherer.block_bytes
        self.begin_s = time.perf_counter() - began_at
        if self.copies.failure is not None and not self.copies.have_begun:
            gatherer.log_refusal(self.copies.failure)
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
        if self.is_cancelled:
            raise TransportError("the push ended before its blocks were written")
        if self.copies.failure is not None:
            raise TransportError(f"blocks could not be gathered: {self.copies.failure}")
        self.record.t_post = time.perf_counter()
        self.handle = self.transport.post_write(self.route, self.local, self.remote)
        self.record.t_posted = time.perf_counter()
        self.stage = Stage.WRITING

    def _free(self) -> None:
        if self.span is not None:
            self.gatherer.staging.ring.free(self.span)
            self.span = None


class Gatherer:
    """``block_bytes`` is the size of a kernel block, the same in every region."""

    def __init__(self, transport: Transport, layout: CacheLayout, staging: Staging, block_bytes: int) -> None:
        self.transport = transport
        self.layout = layout
        self.staging = staging
        self.block_bytes = block_bytes
        self._refusal = ""

    def gather(self, write: Write, route: Route, remote: DescriptorIds, record: WriteRecord) -> StagedWrite | None:
        """Begin a gathered WRITE of ``write`` to ``remote``, the decode engine's blocks. None: it cannot be begun now,
        for lack of room or because the device refuses the copy.
        """
        span = self.staging.ring.allocate(len(remote) * self.block_bytes, self.block_bytes)
        if span is None:
            return None
        first = span // self.block_bytes
        local = np.arange(first, first + len(remote), dtype=np.int32)
        return StagedWrite(
            transport=self.transport,
            record=record,
            handle=None,
            gatherer=self,
            route=route,
            local=local,
            remote=remote,
            span=span,
        ).begin(write)

    def log_refusal(self, reason: str) -> None:
        """The device did not begin a copy: log the reason, unless it is the same as the last time."""
        if reason != self._refusal:
            logger.warning("layerpush: WRITEs go directly, because no copy into staging memory can begin: %s", reason)
        self._refusal = reason
