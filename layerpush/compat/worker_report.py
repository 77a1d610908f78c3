"""A worker's report to its scheduler, beside vLLM's lists of finished loads."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from layerpush.core.first_token import Missing
from layerpush.telemetry.metrics.recorder import Ending

Ranks = dict[str, set[int]]
"""By request id."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """News since the rank's last report.

    On a decode engine: ``parked`` loads failed while a prefill engine may still write; ``cleared`` ones were parked and
    are over. ``first_tokens``: P's first tokens, or the reasons that there are none, of complete loads that have asked
    for one. ``completed``: the time when the rank read the last completion of these loads, in seconds of ``clock``;
    ``clock`` is empty if the ranks' clocks differ. ``queued``: loads that P cannot begin for want of blocks, each with
    names of the prompts that P holds. ``unregistered`` loads are to be registered again.

    On a prefill engine: ``settling``: pushes of aborted requests are not over. ``withdrawn``: requests that the decode
    engine does not want any more.

    On both: ``endings``, the ends of pushes and loads on these ranks, for the metrics.
    """

    parked: Ranks = field(default_factory=dict)
    cleared: Ranks = field(default_factory=dict)
    first_tokens: dict[str, int | Missing] = field(default_factory=dict)
    settling: bool = False
    completed: dict[str, float] = field(default_factory=dict)
    clock: str = ""
    endings: list[Ending] = field(default_factory=list)
    withdrawn: frozenset[str] = frozenset()
    queued: dict[str, frozenset[str]] = field(default_factory=dict)
    unregistered: Ranks = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Join the reports of two ranks, or two reports of one rank. vLLM calls it in the engine core."""
        assert isinstance(other, WorkerReport)
        parked, cleared = _union(self.parked, other.parked), _union(self.cleared, other.cleared)
        completed, tokens = dict(self.completed), dict(self.first_tokens)
        for request_id, at in other.completed.items():
            completed[request_id] = max(at, completed.get(request_id, at))
        for request_id, token in other.first_tokens.items():
            if not isinstance(tokens.get(request_id), int):  # one rank's token is every rank's
                tokens[request_id] = token
        clock = self.clock if self.clock == other.clock else ""
        return WorkerReport(
            parked,
            cleared,
            tokens,
            self.settling or other.settling,
            completed,
            clock,
            [*self.endings, *other.endings],
            self.withdrawn | other.withdrawn,
            self.queued | other.queued,
            _union(self.unregistered, other.unregistered),
        )


def _union(some: Ranks, others: Ranks) -> Ranks:
    return {request_id: some.get(request_id, set()) | others.get(request_id, set()) for request_id in some | others}
