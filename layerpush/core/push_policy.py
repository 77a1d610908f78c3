"""When ready layers become a WRITE."""

from __future__ import annotations

from dataclasses import dataclass

SHORT_PROMPT = "the prompt is shorter than layerwise_min_tokens"
LATE_REGISTRATION = "no decode engine had registered when prefill finished"
"""Reasons to push one request whole. Other reasons are an engine's, in its own words."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When ready layers become a WRITE.

    ``by_layer`` posts as soon as ``min_write_bytes`` are ready, otherwise (and always at the end of a chunk) whole
    chunks go. ``max_in_flight`` WRITEs at most are on the wire: while they are, ready layers merge. Without
    ``streams`` the session only watches and the request is pushed whole.
    """

    by_layer: bool = True
    min_write_bytes: int = 0
    max_in_flight: int = 8
    streams: bool = True
