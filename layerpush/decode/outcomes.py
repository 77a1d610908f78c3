"""Outcomes of loads: counted at once, kept until they can be reported to the engine. Writer thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec.structs import replace

from layerpush.core.first_token import Missing
from layerpush.core.wire import Decline
from layerpush.telemetry.metrics.catalog import LOAD, LOADS
from layerpush.telemetry.metrics.recorder import Ending, Recorder
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.peers import Address

Outcome = Literal["loaded", "unregistered", "failed", "parked", "aborted", "refused"]


class LoadHost(Protocol):
    """The worker, as far as loads use it. Writer thread."""

    def knows(self, request_id: str) -> bool:
        """Whether the engine's main thread tracks the request: an outcome before that would be lost."""

    def loaded(self, completions: Sequence[bytes]) -> None:
        """Every byte is there; ``completions`` are the notifications of the prefill ranks, as they came."""

    def first_token(self, request_id: str, first_token: int | Missing) -> None:
        """P's first token, or the reason that there is none, of a load that asked for it. Comes before ``loaded``."""

    def failed(self, request_id: str) -> None:
        """The load failed: vLLM applies ``kv_load_failure_policy`` to the request."""

    def parked(self, request_id: str) -> None:
        """The load failed, but prefill ranks may still write: the blocks must not be used until ``cleared``. Comes
        before ``failed``.
        """

    def unregistered(self, request_id: str) -> None:
        """No prefill rank has the registration any more: the request is to wait for blocks again. Comes before
        ``failed``.
        """

    def queued(self, request_id: str, computed: Sequence[str]) -> None:
        """P has no free blocks for the prompt; it holds those of the ``computed`` prompts."""

    def cleared(self, request_id: str) -> None:
        """No prefill rank writes into the parked blocks any more."""

    def keep_load(self, record: LoadRecord) -> None:
        """Take the record of a load that is reported now; once more when its parked blocks are free."""

    def mismatch(self, engine_id: str) -> str | None:
        """The reason why no push from a connected prefill engine can be right; None if one can."""

    def decline(self, address: Address, message: Decline) -> None:
        """Report to a prefill engine that this engine will not load a request. The engine need not be connected."""


@dataclass(frozen=True, slots=True)
class _Report:
    record: LoadRecord
    completions: Sequence[bytes] = ()
    first_token: int | Missing | None = None
    clears: bool = False


class Outcomes:
    """An outcome is reported when the engine knows the request."""

    def __init__(self, host: LoadHost, recorder: Recorder) -> None:
        self._host = host
        self._recorder = recorder
        self._reports: deque[_Report] = deque()

    def __len__(self) -> int:
        return len(self._reports)

    def add(
        self,
        record: LoadRecord,
        outcome: Outcome,
        reason: str | None,
        now: float,
        completions: Sequence[bytes] = (),
        first_token: int | Missing | None = None,
    ) -> None:
        """A load is over for its request. ``completions``: the notifications of one that is ``loaded``.
        ``first_token``: P's token or the reason that there is none; None if the load did not ask for it.
        """
        times = {LOAD.key: now - record.t_awaited} if outcome == "loaded" and record.t_awaited is not None else {}
        self._recorder.ended(Ending(record.request_id, LOADS.key, outcome, times=times))
        settled = {"loaded": "completed", "aborted": "cancelled", "unregistered": "cancelled"}.get(outcome, "failed")
        record.settled(settled, reason, now)
        if outcome == "unregistered":
            self._host.unregistered(record.request_id)
        if outcome == "parked":
            record.t_parked = now
            self._host.parked(record.request_id)
        self._reports.append(_Report(record, completions, first_token))

    def clear(self, record: LoadRecord, now: float) -> None:
        """The blocks of a parked load are free again."""
        record.t_cleared = now
        if record.t_reported is not None:
            self._host.keep_load(replace(record))
        self._reports.append(_Report(record, clears=True))

    def tick(self, now: float) -> None:
        """Report the outcomes that the engine can take by now."""
        for _ in range(len(self._reports)):
            report = self._reports.popleft()
            if not self._deliver(report, now):
                self._reports.append(report)

    def _deliver(self, report: _Report, now: float) -> bool:
        request_id, record = report.record.request_id, report.record
        if report.clears:
            self._host.cleared(request_id)
            return True
        if not self._host.knows(request_id):  # its step is not over; every request that was registered will be known
            return False
        record.t_reported = now
        self._host.keep_load(replace(record))  # first: the engine's report of the load includes its time
        if report.completions:
            if report.first_token is not None:
                self._host.first_token(request_id, report.first_token)
            self._host.loaded(report.completions)
        else:
            self._host.failed(request_id)
        return True
