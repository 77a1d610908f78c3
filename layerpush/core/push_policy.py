"""The settings by which a session turns ready layers into WRITEs."""

from __future__ import annotations

from dataclasses import dataclass

SHORT_PROMPT = "the prompt is shorter than layerwise_min_tokens"
LATE_REGISTRATION = "no decode engine had registered when prefill finished"
"""Reasons to push one request whole. ``compat.facts`` has the reasons that hold for a whole engine."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings by which a session turns ready layers into WRITEs.

    With ``by_layer`` a chunk's layers are posted before all of them are ready: each at once, or, with ``scheduled``,
    at the time that ``write_schedule`` gives. A chunk whose layers are all ready is posted in any case. At most
    ``max_in_flight`` WRITEs are on the wire; while there are so many, ready layers merge. Without ``streams`` the
    session only watches, and the request is pushed whole.
    """

    by_layer: bool = True
    scheduled: bool = False
    max_in_flight: int = 8
    streams: bool = True

    @property
    def streams_by_layer(self) -> bool:
        """Whether layers may leave before their chunk is computed."""
        return self.streams and self.by_layer
