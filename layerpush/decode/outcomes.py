"""Outcomes of loads: counted at once, kept until they can be reported to the engine. Writer thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from layerpush.core.first_token import Missing
from layerpush.core.load_news import (
    LoadCleared,
    LoadCompleted,
    LoadKept,
    LoadNews,
    LoadParked,
    LoadToken,
    LoadUnregistered,
)
from layerpush.telemetry.defects import logged
from layerpush.telemetry.metrics.catalog import LOAD, LOADS
from layerpush.telemetry.metrics.recorder import Ended, Recorder
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import LoadRecord, clock_name

if TYPE_CHECKING:
    from layerpush.compat.push_worker import VllmPushWorker

Outcome = Literal["loaded", "unregistered", "failed", "parked", "aborted", "refused"]


@dataclass(slots=True)
class _Report:
    """``news`` goes to the scheduler before the outcome, each once."""

    record: LoadRecord
    news: deque[LoadNews]
    completions: Sequence[bytes] = ()
    first_token: int | Missing | None = None
    clears: bool = False


class Outcomes:
    """Reports an outcome to vLLM's ``worker`` when the engine's main thread knows the request. ``report`` takes the
    scheduler's news, in which this rank of the engine is ``rank``. It gets the news of an outcome first.

    An outcome is queued before anything else is done for it, and stays queued until it is delivered, whatever raises.
    """

    def __init__(
        self,
        worker: VllmPushWorker,
        rank: int,
        report: Callable[[LoadNews], None],
        trace: TraceFile,
        recorder: Recorder,
    ) -> None:
        self._worker = worker
        self._rank = rank
        self.report = report
        self._trace = trace
        self._clock = clock_name()
        self._recorder = recorder
        self._reports: deque[_Report] = deque()

    def __len__(self) -> int:
        return len(self._reports)

    def report_ended(
        self,
        record: LoadRecord,
        outcome: Outcome,
        reason: str | None,
        now: float,
        completions: Sequence[bytes] = (),
        first_token: int | Missing | None = None,
        kept: int = 0,
    ) -> None:
        """A load is over for its request. ``completions``: the notifications of one that is ``loaded``.
        ``first_token``: P's token or the reason that there is none; None if the load did not ask for it. ``kept``: the
        prompt's first tokens whose KV has landed, of one that is not ``loaded``.
        """
        request_id, news = record.request_id, deque[LoadNews]()
        if outcome != "loaded":
            news.append(LoadKept(request_id, kept))
        if outcome == "unregistered":
            news.append(LoadUnregistered(request_id, self._rank))
        if outcome == "parked":
            news.append(LoadParked(request_id, self._rank))
        self._reports.append(_Report(record, news, completions, first_token))
        settled = {"loaded": "completed", "aborted": "cancelled", "unregistered": "cancelled"}.get(outcome, "failed")
        record.settle(settled, reason, now)
        record.kept_tokens = kept
        if outcome == "parked":
            record.t_parked = now
        times = {LOAD.key: now - record.t_awaited} if outcome == "loaded" and record.t_awaited is not None else {}
        with logged("its count", request_id):
            self._recorder.record_ended(Ended(request_id, LOADS.key, outcome, times=times))

    def report_cleared(self, record: LoadRecord, now: float) -> None:
        """The blocks of a parked load are free again."""
        self._reports.append(_Report(record, deque([LoadCleared(record.request_id, self._rank)]), clears=True))
        record.t_cleared = now
        if record.t_reported is not None:
            self._keep(record)

    def tick(self, now: float) -> None:
        """Report the outcomes that the engine can take by now."""
        for _ in range(len(self._reports)):
            if self._deliver(self._reports[0], now):
                self._reports.popleft()
            else:
                self._reports.rotate(-1)

    def _deliver(self, report: _Report, now: float) -> bool:
        request_id, record = report.record.request_id, report.record
        while report.news:
            self.report(report.news[0])
            report.news.popleft()
        if report.clears:
            return True
        if not self._worker.knows(request_id):  # its step is not over; every request that was registered will be known
            return False
        if record.t_reported is None:
            record.t_reported = now
            self._keep(record)  # first: the engine's report of the load includes its time
        if report.completions:
            if report.first_token is not None:
                self.report(LoadToken(request_id, report.first_token))
                report.first_token = None
            self._worker.loaded(report.completions)
        else:
            self._worker.failed(request_id)
        return True

    def _keep(self, record: LoadRecord) -> None:
        """Trace a load that is reported now; once more when its parked blocks are free. Raises nothing."""
        with logged("its trace", record.request_id):
            kept = replace(record, rank=self._worker.tp_rank)
            if kept.outcome == "completed" and kept.t_settled is not None:
                self.report(LoadCompleted(kept.request_id, kept.t_settled, self._clock))
            if kept.prefill_engine_id is not None:
                kept.clock_offset = self._worker.clock_offset(kept.prefill_engine_id)
            self._trace.write_record(kept)
