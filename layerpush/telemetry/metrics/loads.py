"""What a decode rank awaits, as metrics."""

from __future__ import annotations

from layerpush.telemetry.metrics.catalog import LOAD, LOADS, LOST_PEERS
from layerpush.telemetry.metrics.recorder import Recorder


class LoadMeter:
    """Records what becomes of loads and of prefill engines' ranks. Writer thread only."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def ended(self, outcome: str, waited_s: float | None = None) -> None:
        """A load is over for its request, ``waited_s`` seconds after it was begun: "loaded", "failed", "parked" (and
        failed), "aborted" or "refused".
        """
        self._recorder.count(LOADS, outcome)
        if outcome == "loaded" and waited_s is not None:
            self._recorder.observe((LOAD, waited_s))

    def peer_lost(self, how: str) -> None:
        """A rank of a prefill engine was given up: it is "silent" or "gone"."""
        self._recorder.count(LOST_PEERS, how)
