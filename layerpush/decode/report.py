"""What an engine's ranks and its scheduler tell each other of pushes that do not come to their end."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

ABORTED = "aborted"
"""Why a request is cancelled that the engine has finished; any other reason is a deadline."""

Ranks = dict[str, set[int]]
"""By request id."""


@dataclass(slots=True)
class DecodeReport(KVConnectorWorkerMetadata):
    """Since a rank's last report: loads given up while a prefill engine may still write, and those of them now over.

    ``settling``: on a prefill engine, requests were dropped whose pushes are not over.
    """

    parked: Ranks = field(default_factory=dict)
    cleared: Ranks = field(default_factory=dict)
    settling: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> DecodeReport:
        assert isinstance(other, DecodeReport)
        parked, cleared = _union(self.parked, other.parked), _union(self.cleared, other.cleared)
        return DecodeReport(parked, cleared, self.settling or other.settling)


def _union(some: Ranks, others: Ranks) -> Ranks:
    return {request_id: some.get(request_id, set()) | others.get(request_id, set()) for request_id in some | others}
