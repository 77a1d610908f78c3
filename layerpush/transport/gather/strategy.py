"""Chooses whether a WRITE is gathered. Writer thread only."""

from __future__ import annotations

import time
from typing import Literal

from layerpush.core.write import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import DescriptorIds, Route
from layerpush.transport.gather.cost import CopyCost, runs
from layerpush.transport.gather.gatherer import Gatherer, StagedWrite
from layerpush.transport.link_speed import LinkSpeed

Packing = Literal["auto", "gather"]

MARGIN = 0.9
"""A WRITE is gathered only if its estimate is below this part of the direct one's."""


class GatherStrategy:
    """With ``"auto"`` a WRITE takes the plan with the lower estimate: the link's for the wire, and ``copies`` for a
    gather. Only WRITEs with few descriptors beside WRITEs with many show the time of a descriptor. So now and then a
    WRITE takes the other plan, as a trial.

    A WRITE goes directly if staging memory has no room: a full ring never blocks a push.
    """

    def __init__(self, gatherer: Gatherer, packing: Packing, copies: CopyCost) -> None:
        self.gatherer = gatherer
        self._packing = packing
        self._copies = copies

    def begin(
        self,
        write: Write,
        route: Route,
        pairs: tuple[DescriptorIds, DescriptorIds],
        record: WriteRecord,
        speed: LinkSpeed,
    ) -> StagedWrite | None:
        """Begin ``write`` through staging memory; None: it is to go directly.

        ``route`` is that from our ring; ``pairs`` are the descriptor ids in our cache and the decode engine's. Sets the
        plan, its descriptors on the wire and its estimate in ``record``.
        """
        local, remote = pairs
        record.t_planned = time.perf_counter()
        size = len(remote) * self.gatherer.block_bytes
        direct = gathered = len(remote)
        if not self.gatherer.layout.has_gaps:  # here, and so there
            direct, gathered = runs(local, remote), runs(remote)
        staged = None
        if self._gathers(size, direct, gathered, speed):
            staged = self.gatherer.gather(write, route, remote, record)
        record.runs, copy_s = direct, 0.0
        if staged is not None:
            record.plan, record.runs, copy_s = "gathered", gathered, self._copies.seconds(size)
            staged.expected_copy_s, staged.on_landed = copy_s, self._learn
        if speed.is_known:
            record.estimate_s = copy_s + speed.estimate(size, record.runs)
        return staged

    def _gathers(self, size: int, direct: int, gathered: int, speed: LinkSpeed) -> bool:
        """``direct`` and ``gathered``: descriptors of a WRITE of ``size`` bytes by each plan."""
        if self._packing == "gather":
            return True
        if not speed.is_known:
            return False
        direct_s = speed.estimate(size, direct)
        faster = self._copies.seconds(size) + speed.estimate(size, gathered) < MARGIN * direct_s
        comparable = 2 * gathered <= direct and self._copies.at_start(size) <= direct_s
        return faster != (comparable and speed.is_trial())

    def _learn(self, staged: StagedWrite) -> None:
        self._copies.copied(staged.record.bytes, staged.copy_s)
