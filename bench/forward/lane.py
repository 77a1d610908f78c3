"""One mode's push machinery, as a worker has it, and the one thread that turns it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.forward.cores import queued_s
from bench.forward.end import NOTIFICATION_POLL_S
from bench.forward.pair import WorkerStub
from bench.forward.reach import DECODE, Reach
from layerpush.core.push_mode import PushMode
from layerpush.core.wire import Registration, read
from layerpush.engine.worker.wake import Waker
from layerpush.prefill.fences import fences_for
from layerpush.prefill.push import Identity
from layerpush.prefill.pushes import Pushes
from layerpush.prefill.samples import Sampler
from layerpush.prefill.step_events import StepEvents
from layerpush.telemetry.metrics.loop_lag import LoopLag
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import PushRecord, WriteRecord
from layerpush.transport.base import Transport
from layerpush.transport.nixl import NixlTransport
from layerpush.transport.writes import Writes

logger = logging.getLogger(__name__)

IDLE_POLL_S = 50e-3
"""Longest sleep of an engine's idle writer thread in seconds."""


class RecordingMeter(PushMeter):
    """A worker's meter that also keeps the records. Writer thread; other threads read while no push runs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder, engine_fallback=None)
        self.records: list[WriteRecord] = []
        self.pushes: list[PushRecord] = []

    def landed(self, write: WriteRecord, plan: str = "direct", *, whole: bool = False) -> None:
        super().landed(write, plan, whole=whole)
        self.records.append(write)

    def closed(self, push: PushRecord, exposed_s: float | None = None, transfer_s: float = 0.0) -> None:
        super().closed(push, exposed_s, transfer_s)
        self.pushes.append(push)

    def forget(self) -> None:
        self.records, self.pushes = [], []

    @property
    def plans(self) -> dict[str, int]:
        return dict(Counter(write.plan for write in self.records))


class Lane:
    """The writer of one mode, which takes checksums of a share of its pushes."""

    def __init__(self, mode: PushMode, reach: Reach, transport: Transport, waker: Waker, verify: float = 0.0) -> None:
        layout = self.layout = reach.cache.layout
        self.streams = mode is not PushMode.WHOLE
        self.meter = RecordingMeter(Recorder())
        fences = fences_for(reach.cache.slots[0].device)
        self.step_events = StepEvents(layout.index_of, waker.wake, fences, wake_lazily=waker.wake_lazily)
        self.pair = WorkerStub(reach, transport)
        played: Any = self.pair
        self.pushes = self.pair.pushes = Pushes(
            Identity("P", 0),
            mode,
            Writes(transport, layout, reach.strategy if self.streams else None),
            self.step_events,
            played,
            TraceFile(None, "P", 0),
            self.meter,
            Sampler(reach.cache.parts, [layer.name for layer in layout.layers], verify) if verify else None,
        )
        self.pushes.registry = self.pair


class Pusher:
    """A worker's writer thread, for one lane at a time."""

    def __init__(self, transport: NixlTransport) -> None:
        self._lane: Lane | None = None
        self.cpu_s = 0.0
        """Processor seconds of the thread until the end of its last turn."""
        self.failure: BaseException | None = None
        self._transport = transport
        self._lag = LoopLag()
        self.waker = Waker(self._lag.woken)
        self._turning = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="push-writer", daemon=True)
        self._thread.start()

    def queued_s(self) -> float | None:
        """Seconds for which the thread has waited for a core; None if the system does not report them."""
        return queued_s(Path(f"/proc/self/task/{self._thread.native_id}/schedstat"))

    def serve(self, lane: Lane) -> None:
        """Serve this lane from now on. Call it after ``rest``, or while the former lane has no push."""
        self._lane = lane
        self.waker.wake()

    def rest(self) -> None:
        """Serve no lane. Returns between two turns; later turns do nothing until the next ``serve``."""
        self._lane = None
        with self._turning:
            pass

    def _run(self) -> None:
        try:
            while True:
                self.waker.clear()
                self._lag.turn_began(time.perf_counter())
                with self._turning:
                    timeout, polls_layers = self._turn()
                    self.cpu_s = time.thread_time()
                self._lag.turn_ended(time.perf_counter(), timeout)
                self.waker.wait(timeout, polls_layers=polls_layers)
        except BaseException as error:  # else the main thread would wait for ever
            self.failure = error
            logger.exception("the writer thread has died")
            raise

    def _turn(self) -> tuple[float, bool]:
        """One turn. Returns the seconds until the next, and whether that is short enough for the layers of a step."""
        lane = self._lane
        if lane is None:
            return IDLE_POLL_S, False
        for _, payload in self._transport.notifications():
            match read(payload):
                case Registration() as registration:
                    lane.pair.registered(registration)
                case other:
                    raise ValueError(f"{DECODE} sent {other}")
        lane.pushes.turn()
        waits = NOTIFICATION_POLL_S if not lane.pair.all_known.is_set() else IDLE_POLL_S
        now = time.perf_counter()
        due = lane.pushes.next_due(now)
        return waits if due is None else max(0.0, min(due - now, waits)), lane.pushes.polls_layers
