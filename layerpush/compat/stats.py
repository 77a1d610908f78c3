"""vLLM's statistics of a connector, extended by layerpush's. In vLLM's own a push by layer is one transfer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from layerpush.telemetry.metrics.metric_delta import MetricDelta
from layerpush.telemetry.metrics.summary import is_eventful, summary
from layerpush.telemetry.trace_records import WriteSums

KEY = "layerpush"


class TransferStats:
    """Figures of pushes on their way from the writer to vLLM's own statistics. Writer thread, except ``feed``."""

    def __init__(self) -> None:
        self._telemetry: deque[Any] = deque()

    def write_landed(self, telemetry: Any) -> None:
        """A WRITE of a whole push has landed. ``telemetry`` is NIXL's."""
        self._telemetry.append(telemetry)

    def pushed(self, written: WriteSums, transfer_s: float) -> None:
        """A push by layer is complete: for vLLM it is one transfer, of ``transfer_s`` seconds."""
        self._telemetry.append(
            SimpleNamespace(
                xferDuration=1e6 * transfer_s,
                postDuration=1e6 * written.post_s,
                totalBytes=written.bytes,
                descCount=written.descriptors,
            )
        )

    def failed(self) -> None:
        """A WRITE of a whole push, or a push by layer, has failed."""
        self._telemetry.append(None)

    def feed(self, stats: NixlKVConnectorStats) -> None:
        """Record in ``stats`` all figures since the last call. Main thread."""
        while self._telemetry:
            telemetry = self._telemetry.popleft()
            if telemetry is None:
                stats.record_failed_transfer()
            else:
                stats.record_transfer(telemetry)


class LayerPushStats(NixlKVConnectorStats):
    """``data`` is vLLM's dict with a ``MetricDelta``'s data under ``KEY``. vLLM sends it between processes."""

    def reset(self) -> None:
        super().reset()
        self.data[KEY] = MetricDelta().to_data()

    @classmethod
    def joined(cls, of_vllm: KVConnectorStats | None, delta: MetricDelta | None) -> LayerPushStats | None:
        """Both parts as one report; None if there is neither."""
        if of_vllm is None and delta is None:
            return None
        stats = cls()
        if of_vllm is not None:
            stats.data.update(of_vllm.data)
        if delta is not None:
            stats.data[KEY] = delta.to_data()
        return stats

    @property
    def delta(self) -> MetricDelta:
        """A copy of layerpush's part."""
        return MetricDelta.from_data(self.data.get(KEY, {}))

    def is_empty(self) -> bool:
        """Whether vLLM may drop this report instead of sending it to the front end."""
        return self._vllms_is_empty() and self.delta.is_empty

    def aggregate(self, other: KVConnectorStats) -> LayerPushStats:
        """Add the report of another rank or process, or a later one. ``other`` does not change."""
        delta = self.delta
        delta.merge(other.data.get(KEY, {}))
        for key in other.data.keys() - {KEY}:
            self.data[key] = [*self.data.get(key, ()), *other.data[key]]
        self.data[KEY] = delta.to_data()
        return self

    def reduce(self) -> dict[str, int | float]:
        """Numbers for vLLM's log line: layerpush's first, then vLLM's if there were pushes."""
        line = summary(self.delta)
        if not self._vllms_is_empty():
            line |= super().reduce()
        return line

    def _vllms_is_empty(self) -> bool:
        return bool(super().is_empty())

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)


class IntervalStats(LayerPushStats):
    """A front end's sum of reports since its last log line. Copies ``data``: the front end's metrics need it too."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(data or {}))

    def is_empty(self) -> bool:
        """Whether a log line would be empty. Gauges alone make no log line."""
        return self._vllms_is_empty() and not is_eventful(self.delta)
