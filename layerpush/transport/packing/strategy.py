"""Chooses the plan of each WRITE, and keeps the costs of WRITEs to each decode engine. Writer thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from layerpush.core.layout import CacheLayout
from layerpush.core.write import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import DescriptorIds, Route, Transport
from layerpush.transport.link import Link
from layerpush.transport.packing.calibration import Calibration
from layerpush.transport.packing.cost_model import Costs, Plan, TransferSize
from layerpush.transport.packing.memory import MAX_PIECES, PIECE_BYTES
from layerpush.transport.packing.packer import Packer, StagedWrite
from layerpush.transport.packing.parts import split
from layerpush.transport.packing.running_estimate import CopyEstimates, RunningEstimate
from layerpush.transport.packing.runs import transfer_size

logger = logging.getLogger(f"vllm.{__name__}")

Packing = Literal["auto", "gather", "packed"]

MAX_PACKED_BYTES = MAX_PIECES * PIECE_BYTES
"""Bytes of a WRITE from ring to ring. A larger one is split."""
RETRY_S = 30.0
"""A calibration that failed is repeated after this time."""


class _Engine:
    """A decode engine with a ring: the measurement of WRITEs to it, and their costs."""

    def __init__(self, transport: Transport, ring: Route, prior: Costs) -> None:
        self.ring = ring
        self.costs: Costs | None = None
        self.messages = RunningEstimate(prior.messages_s)
        self._transport = transport
        self._prior = prior
        self.calibrate()

    def calibrate(self) -> None:
        """Start a measurement."""
        now = time.perf_counter()
        self.calibration: Calibration | None = Calibration(self._transport, self.ring, self._prior, now)
        self._retry_at = now + RETRY_S

    def turn(self, quiet: bool) -> bool:
        """Continue the measurement, or repeat one that failed. True if this turn found the costs."""
        if self.costs is not None:
            return False
        if self.calibration is None and self._retry_at <= time.perf_counter():
            self.calibrate()
        if self.calibration is not None:
            self.calibration.turn(quiet=quiet)
            if self.calibration.is_over:
                self.costs, self.calibration = self.calibration.costs, None
        return self.costs is not None


class PackingStrategy:
    """Chooses plans. A WRITE goes directly if staging memory has no room: a full ring never blocks a push."""

    def __init__(self, packer: Packer, layout: CacheLayout, packing: Packing, costs: Costs) -> None:
        self.packer = packer
        self._layout = layout
        self._packing = packing
        self._costs = costs
        self._copies = CopyEstimates(costs)
        self._engines: dict[str, _Engine] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a calibration runs, or waits until there is no push. Any thread."""
        return bool(self.engines_to_measure)

    @property
    def engines_in_flight(self) -> set[str]:
        """Decode engines that a WRITE of a calibration is on its way to."""
        return {
            engine_id
            for engine_id, engine in self._engines.items()
            if engine.calibration is not None and engine.calibration.in_flight
        }

    @property
    def engines_to_measure(self) -> set[str]:
        """Decode engines whose calibration runs, or waits until there is no push. Any thread."""
        engines = self._engines.copy()  # the writer may add or remove one meanwhile
        return {engine_id for engine_id, engine in engines.items() if engine.calibration is not None}

    def calibrate(self, engine_id: str, transport: Transport, ring: Route) -> None:
        """Start to measure WRITEs to a decode engine's ring. Until that is over, WRITEs to this engine go directly.

        Has no effect on an engine that is known already.
        """
        if self._packing == "auto" and engine_id not in self._engines:
            self._engines[engine_id] = _Engine(transport, ring, self._costs)

    def turn(self, *, quiet: bool = True) -> None:
        """Continue the calibrations, and repeat those that failed when it is time. ``quiet``: there is no push."""
        for engine_id, engine in self._engines.copy().items():
            if engine.turn(quiet):
                costs = self.costs_to(engine_id)
                logger.info(
                    "layerpush: to decode engine %s 1000 descriptors take %.1f ms, a MiB %.2f ms and %.2f ms to copy",
                    engine_id,
                    1e3 * costs.scattered_s(1000),
                    1e3 * (1 << 20) * costs.wire_s,
                    1e3 * (1 << 20) * costs.gather_s,
                )

    def unpacked(self, agent: str, number: int, done: bool) -> None:
        """A decode rank has unpacked a WRITE (``done``), or will not. Learns the cost of messages from its time."""
        staged = self.packer.unpacked(agent, number, done)
        if staged is None or not done or staged.asked_at is None:
            return
        for engine_id, engine in self._engines.items():
            if engine.ring.agent == agent and engine.costs is not None:
                costs = self.costs_to(engine_id)
                copied = costs.copy_s + len(staged.local) * PIECE_BYTES * costs.scatter_s
                engine.messages.add(time.perf_counter() - staged.asked_at - copied)

    def learn(self, staged: StagedWrite) -> None:
        """Learn the cost of copies from a WRITE that has landed."""
        self._copies.copied(staged.record.bytes, staged.copy_s)

    def costs_to(self, engine_id: str) -> Costs:
        """The current costs of WRITEs to a decode engine: measured and learned, or else the defaults."""
        engine = self._engines.get(engine_id)
        if engine is None or engine.costs is None:
            return self._copies.applied_to(self._costs)
        return replace(self._copies.applied_to(engine.costs), messages_s=engine.messages.value)

    def forget(self, engine_id: str) -> None:
        """The decode engine is gone: drop its costs, and end its calibration."""
        engine = self._engines.pop(engine_id, None)
        if engine is not None and engine.calibration is not None:
            engine.calibration.abandon()

    def split(self, write: Write, link: Link, pairs: tuple[DescriptorIds, DescriptorIds]) -> list[Write]:
        """``write``, or its parts if it is to be packed and is too large for one WRITE. They have its id.

        Arguments as for ``begin``. A window without room for all of ``write`` gets none of it: it is not split.
        """
        local, remote = pairs
        size = len(remote) * self.packer.block_bytes
        if size <= MAX_PACKED_BYTES or link.window is None or size > link.window.offer.size:
            return [write]
        if not self._may_copy(link, len(remote), size):
            return [write]
        transfer = transfer_size(local, remote, self.packer.block_bytes)
        plans = set(self._possible(write, link, transfer, limit=size))
        if self._plan(self.costs_to(link.engine_id), transfer, plans) is not Plan.PACKED:
            return [write]
        return split(write, self._layout.layer_bytes, MAX_PACKED_BYTES)

    def begin(
        self,
        write: Write,
        link: Link,
        pairs: tuple[DescriptorIds, DescriptorIds],
        record: WriteRecord,
    ) -> StagedWrite | None:
        """Begin ``write`` through staging memory; None: it is to go directly.

        ``pairs`` are its descriptor ids, ours and the decode engine's. Sets the plan and its estimate in ``record``.
        """
        local, remote = pairs
        record.t_planned = time.perf_counter()
        size, costs = len(remote) * self.packer.block_bytes, self.costs_to(link.engine_id)
        if not self._may_copy(link, len(remote), size):
            return None
        transfer = transfer_size(local, remote, self.packer.block_bytes)
        possible = set(self._possible(write, link, transfer))
        staged, taken = None, Plan.DIRECT
        while staged is None and (taken := self._plan(costs, transfer, possible)) is not Plan.DIRECT:
            if taken is Plan.PACKED and link.window is not None:
                staged = self.packer.pack(write, link.window, transfer.bytes, record)
            elif taken is Plan.GATHERED and link.gathered is not None:
                staged = self.packer.gather(write, link.gathered, remote, record)
            possible.discard(taken)  # no room for that one: the next best
        if staged is not None:
            staged.on_landed = self.learn
        record.descriptors = len(remote if staged is None else staged.local)
        record.runs = transfer.runs(taken)
        record.plan = taken.value
        record.estimate_s = costs.estimate(taken, transfer)
        return staged

    def _may_copy(self, link: Link, descriptors: int, size: int) -> bool:
        """Whether a plan with a copy can be chosen; cheap, without a count of runs."""
        if self._packing != "auto":
            return True
        engine = self._engines.get(link.engine_id)
        if engine is None or engine.costs is None:
            return False
        return not self.costs_to(link.engine_id).never_pays(descriptors, size)

    def _plan(self, costs: Costs, transfer: TransferSize, possible: set[Plan]) -> Plan:
        match self._packing:
            case "gather":
                return Plan.GATHERED if Plan.GATHERED in possible else Plan.DIRECT
            case "packed":
                return Plan.PACKED if Plan.PACKED in possible else Plan.DIRECT
            case "auto":
                return costs.choose(transfer, possible)

    def _possible(
        self, write: Write, link: Link, transfer: TransferSize, limit: int = MAX_PACKED_BYTES
    ) -> Iterator[Plan]:
        """The plans for a WRITE. ``limit`` is in bytes of a packed one."""
        yield Plan.DIRECT
        if not transfer.bytes:
            return
        if link.gathered is not None:
            yield Plan.GATHERED
        if link.window is not None and transfer.bytes <= limit and all(part.is_gapless for part in write.segments):
            yield Plan.PACKED
