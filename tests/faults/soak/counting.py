"""Reads the engines' counts every few seconds, because a killed engine loses them."""

from __future__ import annotations

from collections import Counter
from functools import partial

from tests.faults.soak import scripted
from tests.faults.soak.engine import Answer
from tests.faults.soak.engine_slots import EngineSlots

EVERY_S = 1.0


class Counting:
    """Adds each kind's effects to ``totals``: numbers of WRITEs, notifications, handshakes and preemptions."""

    def __init__(self, slots: EngineSlots, totals: Counter[str]) -> None:
        self._slots, self._totals = slots, totals
        self._next_at = 0.0
        self._before: dict[tuple[str, int], Counter[str]] = {}

    def advance(self, now: float) -> None:
        if now < self._next_at:
            return
        self._next_at = now + EVERY_S
        for slot in (*self._slots.of("P"), *self._slots.of("D")):
            if slot.calm:
                slot.engine.call(scripted.count, then=partial(self._answered, (slot.name, slot.incarnation)))

    def _answered(self, process: tuple[str, int], answer: Answer) -> None:
        if answer.value is not None:
            counts = Counter(answer.value)
            self._totals.update(counts - self._before.get(process, Counter()))
            self._before[process] = counts
