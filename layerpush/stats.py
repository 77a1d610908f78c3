"""Running totals of one worker's pushes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from layerpush.trace import PushRecord, WriteRecord


@dataclass(slots=True)
class PushCounters:
    """Written by the writer thread only; readers may see a push half counted.

    ``hooked_layers`` and ``swept_layers`` count (chunk, layer) pairs: ready by hook, or found at the end of a step.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    hooked_layers: int = 0
    swept_layers: int = 0
    writes: int = 0
    descriptors: int = 0
    bytes: int = 0

    def landed(self, write: WriteRecord) -> None:
        self.writes += 1
        self.descriptors += write.descriptors
        self.bytes += write.bytes

    def closed(self, push: PushRecord) -> None:
        self.outcomes[push.outcome] += 1
        self.hooked_layers += push.hooked_layers
        self.swept_layers += push.swept_layers
        if push.fallback is not None:
            self.fallbacks[push.fallback] += 1
