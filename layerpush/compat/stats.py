"""vLLM's statistics of a connector, extended by layerpush's: upstream's numbers stay what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from layerpush.telemetry.metrics.summary import is_eventful, summary
from layerpush.telemetry.metrics.tally import Tally

KEY = "layerpush"


class LayerPushStats(NixlKVConnectorStats):
    """``data`` is upstream's dict with a ``Tally``'s data under ``KEY``; it travels between processes as it is."""

    def reset(self) -> None:
        super().reset()
        self.data[KEY] = Tally().to_data()

    @classmethod
    def joined(cls, upstream: KVConnectorStats | None, tally: Tally | None) -> LayerPushStats | None:
        """What there is to report; None if neither has anything."""
        if upstream is None and tally is None:
            return None
        stats = cls()
        if upstream is not None:
            stats.data.update(upstream.data)
        if tally is not None:
            stats.data[KEY] = tally.to_data()
        return stats

    @property
    def tally(self) -> Tally:
        """A copy."""
        return Tally.from_data(self.data.get(KEY, {}))

    def is_empty(self) -> bool:
        """Whether there is nothing to tell the front end, which would be thrown away."""
        return self._is_silent_upstream() and self.tally.is_empty

    def aggregate(self, other: KVConnectorStats) -> LayerPushStats:
        """Add another rank's, another process's or a later report. ``other`` stays as it is."""
        tally = self.tally
        tally.merge(other.data.get(KEY, {}))
        for key in other.data.keys() - {KEY}:
            self.data[key] = [*self.data.get(key, ()), *other.data[key]]
        self.data[KEY] = tally.to_data()
        return self

    def reduce(self) -> dict[str, int | float]:
        """layerpush's numbers first; upstream's, which are about whole-request WRITEs, only when there were any."""
        line = summary(self.tally)
        if not self._is_silent_upstream():
            line |= super().reduce()
        return line

    def _is_silent_upstream(self) -> bool:
        return bool(super().is_empty())

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)


class HeardStats(LayerPushStats):
    """What a front end has heard since its last log line. ``data`` stays the caller's: its metrics need it too."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(data or {}))

    def is_empty(self) -> bool:
        """Whether there is nothing that a log line should tell; levels may have changed all the same."""
        return self._is_silent_upstream() and not is_eventful(self.tally)
