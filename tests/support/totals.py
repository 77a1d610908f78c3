"""Running totals of one worker's pushes and WRITEs, kept beside its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.trace_records import PushRecord, WriteRecord


class Totals:
    """Counts all calls of ``meter`` from now on.

    ``hooked_layers`` and ``swept_layers`` count (chunk, layer) pairs: ready by a hook, or swept at the end of a step.
    """

    def __init__(self, meter: PushMeter) -> None:
        self.outcomes: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.hooked_layers = self.swept_layers = 0
        self.writes = self.descriptors = self.bytes = self.lost_writes = 0
        for name in ("landed", "lost", "closed"):
            setattr(meter, name, _both(getattr(meter, name), getattr(self, f"_{name}")))

    def _landed(self, write: WriteRecord, *_: object, **__: object) -> None:
        self.writes += 1
        self.descriptors += write.descriptors
        self.bytes += write.bytes

    def _lost(self) -> None:
        self.lost_writes += 1

    def _closed(self, push: PushRecord, *_: object) -> None:
        self.outcomes[push.outcome] += 1
        self.hooked_layers += push.hooked_layers
        self.swept_layers += push.swept_layers
        if push.fallback is not None:
            self.fallbacks[push.fallback] += 1


def _both(*calls: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any, **details: Any) -> None:
        for each in calls:
            each(*args, **details)

    return call
