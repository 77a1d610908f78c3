"""Running totals of one worker's pushes and loads. What is recorded as a metric is counted here too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from layerpush.telemetry.trace_records import PushRecord, WriteRecord


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
    lost_writes: int = 0

    def landed(self, write: WriteRecord, plan: str = "direct", *, whole: bool = False) -> None:  # noqa: ARG002
        """A WRITE has landed; ``whole``: upstream's of a whole request. Subclasses tell them apart."""
        self.writes += 1
        self.descriptors += write.descriptors
        self.bytes += write.bytes

    def lost(self) -> None:
        """A WRITE has ended in an error, or could not be posted."""
        self.lost_writes += 1

    def closed(self, push: PushRecord, exposed_s: float | None = None, transfer_s: float = 0.0) -> None:  # noqa: ARG002
        """A push is over; see ``Push`` for its times, in seconds."""
        self.outcomes[push.outcome] += 1
        self.hooked_layers += push.hooked_layers
        self.swept_layers += push.swept_layers
        if push.fallback is not None:
            self.fallbacks[push.fallback] += 1


@dataclass(slots=True)
class LoadCounters:
    """Written by the writer thread only. ``peers`` counts ranks of prefill engines that were given up, by how."""

    outcomes: Counter[str] = field(default_factory=Counter)
    peers: Counter[str] = field(default_factory=Counter)

    def ended(self, outcome: str, waited_s: float | None = None) -> None:  # noqa: ARG002
        """A load is over for its request, ``waited_s`` seconds after it was begun: "loaded", "failed", "parked" (and
        failed), "aborted" or "refused".
        """
        self.outcomes[outcome] += 1

    def peer_lost(self, how: str) -> None:
        """ "silent" or "gone"."""
        self.peers[how] += 1
