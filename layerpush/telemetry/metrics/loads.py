"""What a decode rank awaits, as metrics."""

from __future__ import annotations

from layerpush.telemetry.counters import LoadCounters
from layerpush.telemetry.metrics.catalog import LOAD, LOADS, LOST_PEERS
from layerpush.telemetry.metrics.recorder import Recorder


class LoadMeter(LoadCounters):
    """Running totals that are recorded too. Writer thread only."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def ended(self, outcome: str, waited_s: float | None = None) -> None:
        super().ended(outcome, waited_s)
        self._recorder.count(LOADS, outcome)
        if outcome == "loaded" and waited_s is not None:
            self._recorder.observe((LOAD, waited_s))

    def peer_lost(self, how: str) -> None:
        super().peer_lost(how)
        self._recorder.count(LOST_PEERS, how)
