"""The time of a layer, and from it the times at which the writer polls for layers: then none has to wake it."""

from __future__ import annotations

FENCE_POLL_S = 100e-6
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

    def next_due(
        self, now: float, missing: int, *, by_layer: bool, leave_at: float | None, fenced: bool
    ) -> float | None:
        """When the writer polls for layers, of which ``missing`` are not ready; None: each layer has to wake it.

        ``by_layer``: each layer counts, not only the last one. ``leave_at``: until then ready layers wait for more. A
        layer may take less time than the first ones, so the writer sleeps half of the time.

        ``fenced``: nothing wakes the writer for a layer. So it looks more and more often until one is ready.
        """
        every = self.seconds
        if fenced and self.is_measured:
            expected = self.expected(1 if by_layer else missing) if leave_at is None else leave_at
            half = 0.0 if expected is None else 0.5 * (expected - now)
            return now + min(max(half, FENCE_POLL_S), LONGEST_S)
        if not by_layer:  # a step's last layer wakes it
            return now + LONGEST_S
        if every is None:
            return None
        if leave_at is None or not self.is_measured:
            return now + every
        return now + max(every, 0.5 * (leave_at - now))
