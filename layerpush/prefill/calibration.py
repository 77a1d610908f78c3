"""What a WRITE to one decode engine costs: measured once, on the scratch bytes of its ring, when it first offers one.

Three WRITEs, again and again: one piece, ``PIECES`` pieces that merge into one descriptor, and as many that do not. The
fastest of each gives the cost of a WRITE, of a descriptor and of a byte; ``docs/design/packing.md`` has the formulas.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from dataclasses import replace

import numpy as np

from layerpush.prefill.costs import Costs
from layerpush.staging import PIECE_BYTES, cool
from layerpush.transport.base import DescriptorIds, Route, Transport, TransportError, WriteHandle, WriteState

logger = logging.getLogger("vllm.layerpush.stager")

PIECES = 64
SCRATCH_PIECES = 2 * PIECES
"""At the beginning of every ring: anybody may write there at any time, nobody reads."""
ROUNDS = 8
BUDGET_S = 0.5
"""After so many seconds what is known has to do."""
SPIN_S = 2e-3
"""For how long a turn looks at a WRITE without a pause: shorter ones are timed exactly."""


class Sample(enum.Enum):
    SMALL = "one piece"
    MERGED = "pieces that lie side by side"
    APART = "pieces that do not"


_IDS = {
    Sample.SMALL: np.arange(1, dtype=np.int32),
    Sample.MERGED: np.arange(PIECES, dtype=np.int32),
    Sample.APART: np.arange(0, SCRATCH_PIECES, 2, dtype=np.int32),
}


class Calibration:
    """Writer thread only. ``costs`` is None until it is over, and if it fails."""

    def __init__(self, transport: Transport, route: Route, prior: Costs, now: float) -> None:
        self.costs: Costs | None = None
        self.is_over = False
        self._transport = transport
        self._route = route
        self._prior = prior
        self._deadline = now + BUDGET_S
        self._waiting = [sample for _ in range(ROUNDS) for sample in Sample]
        self._fastest = dict.fromkeys(Sample, math.inf)
        self._sample = Sample.SMALL
        self._handle: WriteHandle | None = None
        self._posted = 0.0

    def turn(self) -> None:
        """Go on for a moment. A WRITE that is on the wire is waited for, however long that takes."""
        if self.is_over:
            return
        spin_until = min(time.perf_counter() + SPIN_S, self._deadline)
        try:
            self._step()
            while not self.is_over and time.perf_counter() < spin_until:
                self._step()
        except Exception as error:  # noqa: BLE001  a transport that breaks its contract: WRITEs to this engine go directly
            logger.warning("layerpush cannot time WRITEs to %s: %s", self._route.agent, error)
            self._forget()
            self.is_over = True

    def abandon(self) -> None:
        """The decode engine is gone."""
        self._forget()
        self.is_over = True

    def _step(self) -> None:
        if self._handle is None:
            self._begin()
        elif self._transport.poll(self._handle) is WriteState.LANDED:
            took = time.perf_counter() - self._posted
            self._fastest[self._sample] = min(self._fastest[self._sample], took)
            self._forget()

    def _begin(self) -> None:
        if not self._waiting or time.perf_counter() > self._deadline:
            self.costs = self._learned()
            self.is_over = True
            return
        self._sample = self._waiting.pop(0)
        ids: DescriptorIds = _IDS[self._sample]
        cool()
        self._posted = time.perf_counter()
        self._handle = self._transport.post_write(self._route, ids, ids)

    def _learned(self) -> Costs | None:
        small, merged, apart = (self._fastest[sample] for sample in Sample)
        if math.isinf(small + merged + apart):
            return None
        descriptor_s = max(apart - merged, 0.0) / (PIECES - 1)
        wire_s = max(merged - small, 0.0) / ((PIECES - 1) * PIECE_BYTES)
        write_s = max(small - descriptor_s - PIECE_BYTES * wire_s, 0.0)
        return replace(self._prior, descriptor_s=descriptor_s, wire_s=wire_s, write_s=write_s)

    def _forget(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                self._transport.release(handle)
            except TransportError:
                return  # NIXL keeps it until its agent goes: one small request
