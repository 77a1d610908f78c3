"""The time of a layer, and from it the writer's poll interval: if the writer polls, no layer has to wake it."""

from __future__ import annotations

SHORTEST_S = 300e-6
LONGEST_S = 5e-3
POLLS_APART = 0.5
"""The poll interval, in layers. A ready layer waits for half a layer's time at most, for a quarter on average."""


class LayerInterval:
    """Estimates the time of a layer. Writer thread only. Times in seconds."""

    def __init__(self) -> None:
        self._earlier: float | None = None
        self._first: float | None = None
        self._after_first = 0
        self.last: float | None = None
        """When the newest layer of the step was ready."""

    def step_begins(self) -> None:
        """The time between two steps is not a layer's."""
        self._earlier = self.layer_s
        self._first = self.last = None
        self._after_first = 0

    @property
    def is_measured(self) -> bool:
        """Whether the running step itself has shown how long its layers take."""
        return self._after_first > 0

    @property
    def layer_s(self) -> float | None:
        """Seconds per layer: the mean of the running step, or else of the last measured step; None before it."""
        if self._first is not None and self.last is not None and self.is_measured:
            return (self.last - self._first) / self._after_first
        return self._earlier

    def expected(self, layers: int) -> float | None:
        """When so many more layers should be ready, by the running step's own layers; None until it has had two."""
        if self.last is None or self.layer_s is None or not self.is_measured:
            return None
        return self.last + layers * self.layer_s

    def layer_ready(self, at: float) -> None:
        """A layer was ready at ``at``; the times ascend. Layers that one poll has found have the same time."""
        if self._first is None:
            self._first = at
        self._after_first += at > self._first
        self.last = at

    @property
    def seconds(self) -> float | None:
        """The poll interval while a step is being computed; None until a step has had two layers."""
        if self.layer_s is None:
            return None
        return min(max(POLLS_APART * self.layer_s, SHORTEST_S), LONGEST_S)
