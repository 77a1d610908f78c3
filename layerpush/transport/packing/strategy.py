"""Chooses the plan of each WRITE, and keeps the costs of copies. Writer thread only."""

from __future__ import annotations

import time
from typing import Literal

from layerpush.core.write import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import DescriptorIds, Route
from layerpush.transport.packing.cost_model import Costs, Plan, TransferSize
from layerpush.transport.packing.packer import Packer, StagedWrite
from layerpush.transport.packing.running_estimate import CopyEstimates
from layerpush.transport.packing.runs import transfer_size

Packing = Literal["auto", "gather"]


class PackingStrategy:
    """Chooses plans. A WRITE goes directly if staging memory has no room: a full ring never blocks a push."""

    def __init__(self, packer: Packer, packing: Packing, costs: Costs) -> None:
        self.packer = packer
        self._packing = packing
        self._costs = costs
        self._copies = CopyEstimates(costs)

    @property
    def costs(self) -> Costs:
        """The current costs: those of copies are learned, the others are assumed."""
        return self._copies.applied_to(self._costs)

    def learn(self, staged: StagedWrite) -> None:
        """Learn the cost of copies from a WRITE that has landed."""
        self._copies.copied(staged.record.bytes, staged.copy_s)

    def begin(
        self,
        write: Write,
        route: Route,
        pairs: tuple[DescriptorIds, DescriptorIds],
        record: WriteRecord,
    ) -> StagedWrite | None:
        """Begin ``write`` through staging memory; None: it is to go directly.

        ``route`` is that from our ring; ``pairs`` are the descriptor ids in our cache and the decode engine's. Sets the
        plan and its estimate in ``record``.
        """
        local, remote = pairs
        record.t_planned = time.perf_counter()
        costs = self.costs
        if self._packing == "auto" and costs.never_pays(len(remote), len(remote) * self.packer.block_bytes):
            return None
        transfer, staged, plan = transfer_size(local, remote, self.packer.block_bytes), None, Plan.DIRECT
        if self._plan(costs, transfer) is Plan.GATHERED:
            staged = self.packer.gather(write, route, remote, record)
        if staged is not None:
            plan, staged.on_landed = Plan.GATHERED, self.learn
        record.runs = transfer.runs(plan)
        record.plan = plan.value
        record.estimate_s = costs.estimate(plan, transfer)
        return staged

    def _plan(self, costs: Costs, transfer: TransferSize) -> Plan:
        return Plan.GATHERED if self._packing == "gather" else costs.choose(transfer)
