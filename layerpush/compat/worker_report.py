"""``WorkerReport``: what a rank tells the scheduler after a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from layerpush.core.load_news import LoadNews
from layerpush.telemetry.metrics.recorder import Ended


@dataclass(frozen=True, slots=True)
class PushWithdrawn:
    """The decode engine does not want this request of this prefill engine any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AbortsPending:
    """Pushes of aborted requests of this prefill engine are not over."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A rank of this decode engine does not hold a kept turn any more."""

    request_id: str
    rank: int


Reported = LoadNews | TurnEnded | PushWithdrawn | AbortsPending | Ended


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What happened on the ranks since their last reports, in the order of events on each. Never empty."""

    news: Sequence[Reported]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Join the reports of two ranks. vLLM calls it in the engine core."""
        assert isinstance(other, WorkerReport)
        return WorkerReport([*self.news, *other.news])
