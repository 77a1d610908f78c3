"""How often the writer polls a step that is being computed, so that no layer has to wake it."""

from __future__ import annotations

SHORTEST_S = 300e-6
LONGEST_S = 5e-3
POLLS_APART = 0.5
"""In layers: a ready layer waits for half a layer's time at most, and for a quarter on average."""
WEIGHT = 0.2
"""Of the newest layer, in the estimate of a layer's time."""


class LayerInterval:
    """Estimates how long a layer takes. Writer thread only. Times in seconds."""

    def __init__(self) -> None:
        self._layer_s: float | None = None
        self._last: float | None = None

    def step_begins(self) -> None:
        """The time between two steps is not a layer's."""
        self._last = None

    def layer_ready(self, at: float) -> None:
        """A layer was ready at ``at``; the times ascend."""
        if self._last is not None:
            took = at - self._last
            known = self._layer_s
            self._layer_s = took if known is None else known + WEIGHT * (took - known)
        self._last = at

    @property
    def seconds(self) -> float | None:
        """The poll interval while a step is being computed; None until a step has had two layers."""
        if self._layer_s is None:
            return None
        return min(max(POLLS_APART * self._layer_s, SHORTEST_S), LONGEST_S)
