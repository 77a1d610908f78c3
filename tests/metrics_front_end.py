"""vLLM's own way from a connector's statistics to ``/metrics``, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from layerpush.plugin import register

LABELS = ["model_name", "engine"]


class FrontEnd:
    """The metrics of vLLM's API server for ``engines`` data-parallel engines."""

    def __init__(self, engines: int = 1, connector: str = "LayerwisePushConnector", **extra: Any) -> None:
        register()
        unregister_vllm_metrics()
        transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)
        self.transfer = transfer
        labels: dict[int, list[object]] = {index: ["m", str(index)] for index in range(engines)}
        config: Any = SimpleNamespace(kv_transfer_config=transfer)
        self.prom = KVConnectorProm(config, LABELS, labels)
        self.logging = KVConnectorLogging(transfer)

    def hear(self, payload: Mapping[str, Any], engine: int = 0) -> None:
        """Observe the statistics of a step, after their way over the wire between engine core and front end."""
        encoded = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=dict(payload)))
        stats = MsgpackDecoder(SchedulerStats).decode(encoded)
        self.logging.observe(stats.kv_connector_stats)
        self.prom.observe(stats.kv_connector_stats, engine)

    def log_line(self) -> str | None:
        """The next periodic log line."""
        lines: list[str] = []
        self.logging.log(lambda form, text: lines.append(form % text))
        return lines[0] if lines else None

    @staticmethod
    def close() -> None:
        unregister_vllm_metrics()
