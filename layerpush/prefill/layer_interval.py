"""How often the writer has to look at a step that is being computed, so that nobody needs to wake it."""

from __future__ import annotations

NAP_S = 300e-6
"""Whoever sleeps no longer need not be woken for what is not urgent."""
LAYERS_APART = 0.5
"""Of the time that a layer takes: what is ready waits for half a layer at most, and for a quarter on average."""
LONGEST_S = 5e-3
WEIGHT = 0.2
"""Of the newest layer in what a layer is taken to take."""


class LayerInterval:
    """Writer thread only. Times in seconds."""

    def __init__(self) -> None:
        self._layer_s: float | None = None
        self._last: float | None = None

    def step_begins(self) -> None:
        """What comes between two steps says nothing of layers."""
        self._last = None

    def layer_ready(self, at: float) -> None:
        """A layer was ready at ``at``, in the order of these times."""
        if self._last is not None:
            took = at - self._last
            known = self._layer_s
            self._layer_s = took if known is None else known + WEIGHT * (took - known)
        self._last = at

    @property
    def seconds(self) -> float | None:
        """How long the writer may sleep while a step is being computed; None if nothing is known of layers yet."""
        if self._layer_s is None:
            return None
        return min(max(LAYERS_APART * self._layer_s, NAP_S), LONGEST_S)
