"""Logs which layers of a model call no hook. Writer thread only."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from layerpush.core.layout import CacheLayout

logger = logging.getLogger(f"vllm.{__name__}")

GRAPH_TOKENS = 64
"""A prompt with more tokens in a step is in no decode graph, if the size of the engine's graphs is not known."""
NAMED = 4


class UnhookedLayers:
    """Logs one warning for an engine. The tokens are right all the same, so nothing else shows the lost overlap.

    A step of at most ``captured_tokens`` tokens may replay a CUDA graph, which calls no hook of any model.
    """

    def __init__(self, model: str, layout: CacheLayout, captured_tokens: int = 0) -> None:
        self._model = model
        self._captured_tokens = max(captured_tokens, GRAPH_TOKENS)
        self._names = {index: layer.name for index, layer in enumerate(layout.layers) if layer.calls_hook}
        self._is_logged = False

    def step_ended(self, swept: Sequence[int], tokens: int) -> None:
        """In a step no hook reported the layers ``swept``, indices of the layout. ``tokens`` is the largest number of
        tokens that the step computed of one prompt that is pushed by layer. Layers that never call one do not count.
        """
        unhooked = [self._names[layer] for layer in swept if layer in self._names]
        if self._is_logged or not unhooked or tokens <= self._captured_tokens:
            return
        self._is_logged = True
        logger.warning(
            "layerpush: %d of %d layers of model %s called no hook in a step of %d tokens: the KV of these layers is "
            "pushed by chunk, after the forward pass: %s%s",
            len(unhooked),
            len(self._names),
            self._model,
            tokens,
            ", ".join(unhooked[:NAMED]),
            ", ..." if len(unhooked) > NAMED else "",
        )
