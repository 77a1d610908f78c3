"""The settings by which a session turns ready layers into WRITEs."""

from __future__ import annotations

from dataclasses import dataclass

from layerpush.core.config import PushMode

SHORT_PROMPT = "the prompt is shorter than layerwise_min_tokens"
LATE_REGISTRATION = "no decode engine had registered when prefill finished"
"""Reasons to push one request whole. ``compat.engine_settings`` has the reasons that hold for a whole engine."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A push mode, and a limit of WRITEs.

    By layer, a chunk's layers are posted before all of them are ready: each at once (``layer``), or at the time that
    ``write_schedule`` gives (``auto``). A chunk whose layers are all ready is posted in any case, except with
    ``request``: then the session only watches, and vLLM pushes the request whole. At most ``max_in_flight`` WRITEs are
    on the wire; while there are so many, ready layers merge.
    """

    mode: PushMode = "layer"
    max_in_flight: int = 8

    @property
    def streams(self) -> bool:
        """Whether chunks leave before prefill has ended."""
        return self.mode != "request"

    @property
    def by_layer(self) -> bool:
        """Whether layers may leave before their chunk is computed."""
        return self.mode in ("auto", "layer")
