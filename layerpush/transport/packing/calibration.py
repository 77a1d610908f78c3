"""What a WRITE to one decode engine costs: measured once, on the scratch bytes of its ring, when it first offers one.

A few WRITEs, again and again: one piece, all pieces of the scratch bytes, which merge into one descriptor, and some
numbers of pieces that do not merge. The fastest of each gives the cost of a WRITE, of a byte and of descriptors;
``docs/design/packing.md`` has the formulas.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from layerpush.transport.base import DescriptorIds, Route, Transport, TransportError, WriteHandle, WriteState
from layerpush.transport.packing.cost_model import Costs
from layerpush.transport.packing.memory import PIECE_BYTES, cool

logger = logging.getLogger("vllm.layerpush.stager")

SCRATCH_PIECES = 128
"""At the beginning of every ring: anybody may write there at any time, nobody reads."""
APART = (64, 512, 1000)
"""The more there are, the less each may take. From 1024 on NIXL spreads them over threads of its own: an agent that
goes while those are at work crashes its process, and an engine may have to go at any time.
"""
ROUNDS = 5
BUDGET_S = 0.5
"""After so many seconds what is known has to do."""
SPIN_S = 2e-3
"""For how long a turn looks at a WRITE without a pause: shorter ones are timed exactly."""
QUIET_S = 10.0
"""For so long it waits until there is no push that it would be in the way of, and then goes on regardless."""


@dataclass(frozen=True)
class Sample:
    """A WRITE of so many pieces, side by side or apart: then the scratch bytes are written more than once."""

    pieces: int
    apart: bool = False

    def ids(self) -> DescriptorIds:
        if not self.apart:
            return np.arange(self.pieces, dtype=np.int32)
        return np.resize(np.arange(0, SCRATCH_PIECES, 2, dtype=np.int32), self.pieces)


SMALL, MERGED = Sample(1), Sample(SCRATCH_PIECES)
SAMPLES = (SMALL, MERGED, *(Sample(pieces, apart=True) for pieces in APART))


class Calibration:
    """Writer thread only. ``costs`` is None until it is over, and if it fails."""

    def __init__(self, transport: Transport, route: Route, prior: Costs, now: float) -> None:
        self.costs: Costs | None = None
        self.is_over = False
        self._transport = transport
        self._route = route
        self._prior = prior
        self._deadline = now + BUDGET_S
        self._regardless = now + QUIET_S
        self._left = now
        self._waiting = [sample for _ in range(ROUNDS) for sample in SAMPLES]
        self._fastest = dict.fromkeys(SAMPLES, math.inf)
        self._sample = SMALL
        self._handle: WriteHandle | None = None
        self._posted = 0.0

    @property
    def in_flight(self) -> bool:
        """Whether a WRITE is on the wire."""
        return self._handle is not None

    def turn(self, *, quiet: bool = True) -> None:
        """Go on for a moment. A WRITE that is on the wire is waited for, however long that takes; the next is begun
        while it is ``quiet``, which means that there is no push, or later than ``QUIET_S``.
        """
        began = time.perf_counter()
        goes_on = quiet or began > self._regardless
        if self.is_over or not (goes_on or self.in_flight):
            return
        if self._handle is None:
            self._deadline += began - self._left  # what the writer did meanwhile takes nothing from the budget
        spin_until = min(began + SPIN_S, self._deadline)
        try:
            self._step()
            while not self.is_over and (goes_on or self.in_flight) and time.perf_counter() < spin_until:
                self._step()
        except Exception as error:  # noqa: BLE001  a transport that breaks its contract: WRITEs to this engine go directly
            logger.warning("layerpush cannot time WRITEs to %s: %s", self._route.agent, error)
            self._forget()
            self.is_over = True
        self._left = time.perf_counter()

    def abandon(self) -> None:
        """The decode engine is gone."""
        self._forget()
        self.is_over = True

    def _step(self) -> None:
        if self._handle is None:
            self._begin()
            return
        state = self._transport.poll(self._handle)
        if state is WriteState.LANDED:
            took = time.perf_counter() - self._posted
            self._fastest[self._sample] = min(self._fastest[self._sample], took)
        if state is not WriteState.PENDING:
            self._forget()

    def _begin(self) -> None:
        if not self._waiting or time.perf_counter() > self._deadline:
            self.costs = self._learned()
            self.is_over = True
            return
        self._sample = self._waiting.pop(0)
        if time.perf_counter() + self._at_least_s() > self._deadline:
            return
        ids = self._sample.ids()
        cool()
        self._posted = time.perf_counter()
        self._handle = self._transport.post_write(self._route, ids, ids)

    def _at_least_s(self) -> float:
        """What the bytes of the next sample alone will take, as far as that is known."""
        merged = self._fastest[MERGED]
        return 0.0 if math.isinf(merged) else merged * self._sample.pieces / SCRATCH_PIECES

    def _learned(self) -> Costs | None:
        small, merged = self._fastest[SMALL], self._fastest[MERGED]
        apart = {sample.pieces: took for sample, took in self._fastest.items() if sample.apart and took < math.inf}
        if math.isinf(small + merged) or not apart:
            return None
        wire_s = max(merged - small, 0.0) / ((SCRATCH_PIECES - 1) * PIECE_BYTES)
        few = min(apart)
        one_s = max(apart[few] - small - (few - 1) * PIECE_BYTES * wire_s, 0.0) / (few - 1)
        write_s = max(small - one_s - PIECE_BYTES * wire_s, 0.0)
        seconds = accumulate((took - write_s - n * PIECE_BYTES * wire_s for n, took in apart.items()), max, initial=0.0)
        scattered = tuple(zip(apart, list(seconds)[1:], strict=True))
        return replace(self._prior, scattered=scattered, wire_s=wire_s, write_s=write_s)

    def _forget(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                self._transport.release(handle)
            except TransportError:
                return  # NIXL keeps it until its agent goes: one small request
