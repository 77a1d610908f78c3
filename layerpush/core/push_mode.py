"""How the KV cache of a request leaves P: the one push mode, and the reasons to push a request whole."""

from __future__ import annotations

import enum

SHORT_PROMPT = "the prompt is shorter than layerwise_min_tokens"
LATE_REGISTRATION = "no decode engine had registered when prefill finished"
"""Reasons to push one request whole. ``compat.engine_settings`` has the reasons that hold for a whole engine."""
MAX_IN_FLIGHT = 8
"""WRITEs of one push on the wire. While there are so many, ready layers merge."""


class PushMode(enum.StrEnum):
    """A value is the word for the mode in configuration, requests and traces. A chunk whose layers are all ready is
    posted at once, except with ``WHOLE``.
    """

    AUTO = "auto"
    """By layer, at the times that ``prefill.write_schedule`` gives."""
    LAYER = "layer"
    """By layer, each at once."""
    CHUNK = "chunk"
    """All layers of a chunk together, after its step."""
    WHOLE = "request"
    """The whole request after prefill, by vLLM. layerpush only watches."""

    @property
    def by_layer(self) -> bool:
        """Whether layers may leave before their chunk is computed."""
        return self in (PushMode.AUTO, PushMode.LAYER)
