"""Measures the cost of WRITEs to one decode engine, once, when it first offers a window of its ring.

It writes to the scratch bytes of the ring, each of these several times: one piece; all scratch pieces, which merge into
one descriptor; and several numbers of pieces that do not merge. The fastest WRITE of each kind counts. The costs of a
WRITE, of a byte and of descriptors follow from these times; ``docs/design/packing.md`` has the formulas.
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

logger = logging.getLogger(f"vllm.{__name__}")

SCRATCH_PIECES = 128
"""Pieces at the beginning of every ring that any P may overwrite at any time. No rank reads them."""
APART = (64, 512, 1000)
"""Numbers of pieces that do not merge. There are several, because a piece may cost less in a larger WRITE. From 1024
pieces on, NIXL spreads a WRITE over its own threads; an agent that is closed while they work crashes its process.
"""
ROUNDS = 5
BUDGET_S = 0.5
"""After this time the measurement ends with the samples that it has."""
SPIN_S = 2e-3
"""A turn polls a WRITE for this long without a pause, to time short WRITEs exactly."""
QUIET_S = 10.0
"""The measurement waits for a time without pushes, but no longer than this."""


@dataclass(frozen=True)
class Sample:
    """A WRITE of ``pieces`` pieces, which are neighbours, or ``apart``. More than 64 apart repeat the same pieces."""

    pieces: int
    apart: bool = False

    def ids(self) -> DescriptorIds:
        """The ids of its pieces in a ring, int32 of shape ``(pieces,)``."""
        if not self.apart:
            return np.arange(self.pieces, dtype=np.int32)
        return np.resize(np.arange(0, SCRATCH_PIECES, 2, dtype=np.int32), self.pieces)


SMALL, MERGED = Sample(1), Sample(SCRATCH_PIECES)
SAMPLES = (SMALL, MERGED, *(Sample(pieces, apart=True) for pieces in APART))


class Calibration:
    """Writer thread only. ``costs`` is None until the measurement is over, and after a failure."""

    def __init__(self, transport: Transport, route: Route, prior: Costs, now: float) -> None:
        self.costs: Costs | None = None
        self.is_over = False
        self._transport = transport
        self._route = route
        self._prior = prior
        self._deadline = now + BUDGET_S
        self._begin_anyway_at = now + QUIET_S
        self._turn_ended = now
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
        """Measure for up to ``SPIN_S`` seconds. ``quiet``: there is no push.

        A WRITE on the wire is polled in any case. The next WRITE begins only while it is quiet, or after ``QUIET_S``.
        """
        began = time.perf_counter()
        may_begin = quiet or began > self._begin_anyway_at
        if self.is_over or not (may_begin or self.in_flight):
            return
        if self._handle is None:
            self._deadline += began - self._turn_ended  # the time between turns does not count
        spin_until = min(began + SPIN_S, self._deadline)
        try:
            self._step()
            while not self.is_over and (may_begin or self.in_flight) and time.perf_counter() < spin_until:
                self._step()
        except Exception as error:  # noqa: BLE001  a defect of the transport: WRITEs to this engine go directly
            logger.warning("layerpush cannot time WRITEs to %s: %s", self._route.agent, error)
            self._release()
            self.is_over = True
        self._turn_ended = time.perf_counter()

    def abandon(self) -> None:
        """End the measurement: the decode engine is gone."""
        self._release()
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
            self._release()

    def _begin(self) -> None:
        if not self._waiting or time.perf_counter() > self._deadline:
            self.costs = self._result()
            self.is_over = True
            return
        self._sample = self._waiting.pop(0)
        if time.perf_counter() + self._least_s() > self._deadline:
            return
        ids = self._sample.ids()
        cool()
        self._posted = time.perf_counter()
        self._handle = self._transport.post_write(self._route, ids, ids)

    def _least_s(self) -> float:
        """The least seconds that the bytes of the next sample will take; 0 if unknown."""
        merged = self._fastest[MERGED]
        return 0.0 if math.isinf(merged) else merged * self._sample.pieces / SCRATCH_PIECES

    def _result(self) -> Costs | None:
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

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                self._transport.release(handle)
            except TransportError:
                return  # NIXL keeps the handle until its agent is closed: it is small
