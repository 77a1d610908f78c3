"""A prefill rank's pushes and WRITEs as metrics."""

from __future__ import annotations

from layerpush.core.push_mode import LATE_REGISTRATION, SHORT_PROMPT, PushMode
from layerpush.telemetry.metrics.catalog import (
    EXPOSED,
    FAILED_WRITES,
    LAYERS_READY,
    PUSHES,
    REWOUND_PUSHES,
    TRANSFER,
    WRITE_BYTES,
    WRITE_DESCRIPTORS,
    WRITE_ESTIMATE,
    WRITE_LAYERS,
    WRITE_SECONDS,
    WRITES,
)
from layerpush.telemetry.metrics.recorder import Ended, Recorder
from layerpush.telemetry.trace_records import PushRecord, WriteRecord


class PushMeter:
    """Records WRITEs, and the ends of pushes on this rank. Writer thread only.

    ``engine_fallback``: the reason why this engine cannot push by layer or chunk.
    """

    def __init__(self, recorder: Recorder, *, engine_fallback: str | None = None) -> None:
        self._recorder = recorder
        self._engine_fallback = engine_fallback

    def landed(self, write: WriteRecord, plan: str = "direct", *, whole: bool = False) -> None:
        """A WRITE has landed; ``whole``: vLLM's of a whole request."""
        sizes = [(WRITE_BYTES, float(write.bytes)), (WRITE_DESCRIPTORS, float(write.descriptors))]
        if not whole:  # vLLM records their regions instead of layers
            sizes.append((WRITE_LAYERS, float(write.layers[1] - write.layers[0] + 1)))
        if write.estimate_s is not None and write.t_planned is not None and write.t_landed is not None:
            sizes += [(WRITE_ESTIMATE, write.estimate_s), (WRITE_SECONDS, write.t_landed - write.t_planned)]
        self._recorder.count(WRITES, plan)
        self._recorder.observe(*sizes)

    def lost(self) -> None:
        """A WRITE has ended in an error, or could not be posted."""
        self._recorder.count(FAILED_WRITES)

    def rewound(self) -> None:
        """vLLM has taken back a step after the completion that rests on it."""
        self._recorder.count(REWOUND_PUSHES)

    def closed(self, push: PushRecord, exposed_s: float | None = None, transfer_s: float = 0.0) -> None:
        """A push is over; see ``Push`` for its times, in seconds."""
        self._recorder.count(LAYERS_READY, "hooked", push.hooked_layers)
        self._recorder.count(LAYERS_READY, "swept", push.swept_layers)
        fallback = None if push.fallback is None else self._reason(push.fallback)
        times = {}
        if push.outcome == "completed":
            times[TRANSFER.key] = transfer_s
            if exposed_s is not None:
                times[EXPOSED.key] = exposed_s
        self._recorder.record_ended(Ended(push.request_id, PUSHES.key, self._outcome(push), fallback, times))

    def _outcome(self, push: PushRecord) -> str:
        if push.outcome == "failed" and push.decode_request_id is None:
            return "unclaimed"
        if push.outcome != "completed":
            return push.outcome
        if push.mode != PushMode.WHOLE:
            return "layerwise"
        if push.fallback is None:
            return "whole"
        return "late_registration" if push.fallback == LATE_REGISTRATION else "fallback"

    def _reason(self, fallback: str) -> str:
        if fallback == LATE_REGISTRATION:
            return "late_registration"
        if fallback == SHORT_PROMPT:
            return "short_prompt"
        return "engine" if fallback == self._engine_fallback else "decode_engine"
