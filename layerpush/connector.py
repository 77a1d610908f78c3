"""``LayerwisePushConnector``, the class that vLLM makes and calls. It only delegates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from layerpush.compat.engine_settings import returns_aux_outputs
from layerpush.compat.metadata import LayerwiseMetadata
from layerpush.compat.nixl_connector import NixlBaseConnector, NixlPushConnector
from layerpush.compat.prometheus import LayerPushPromMetrics
from layerpush.compat.stats import IntervalStats, LayerPushStats
from layerpush.core.config import LayerPushConfig
from layerpush.engine.scheduler.scheduler import LayerwisePushScheduler
from layerpush.engine.worker.worker import LayerwisePushWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from layerpush.compat.worker_report import WorkerReport


class LayerwisePushConnector(NixlPushConnector):
    """Pushes each layer's KV blocks to the decode engine while prefill runs; see docs/design.

    Raises ``layerpush.core.config.ConfigError`` at start-up for a bad ``kv_connector_extra_config`` and ``ValueError``
    for decode context parallelism, as vLLM's push connector does, for sleep mode and for auxiliary outputs.
    """

    is_layerpush = True
    """By this, patches of vLLM find the connector inside of a ``MultiConnector``."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # Not NixlPushConnector's initialiser: it would build a second worker with a second NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ValueError("LayerwisePushConnector does not support decode_context_parallel_size > 1.")
        if vllm_config.model_config.enable_sleep_mode:  # vLLM 0.33 refuses it itself
            raise ValueError(
                "LayerwisePushConnector does not support sleep mode: memory that NIXL has registered would move. "
                "Start the engine without enable_sleep_mode (--enable-sleep-mode)."
            )
        if returns_aux_outputs(vllm_config):  # vLLM refuses it for its NIXL connectors, which it knows by their names
            raise ValueError(
                "LayerwisePushConnector does not support auxiliary outputs: the decode engine would compute every "
                "prompt itself. Start the engine without --enable-return-routed-experts."
            )
        config = LayerPushConfig.from_extra_config(self.kv_transfer_config.kv_connector_extra_config)
        self.connector_scheduler: LayerwisePushScheduler | None = None
        self.connector_worker: LayerwisePushWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = LayerwisePushScheduler(vllm_config, self.engine_id, kv_cache_config, config)
        elif role == KVConnectorRole.WORKER:
            self.connector_worker = LayerwisePushWorker(vllm_config, self.engine_id, kv_cache_config, config)
        else:
            raise ValueError(f"Unsupported KVConnectorRole: {role}")

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Hand over the manager of the KV cache's blocks. Scheduler's thread, before the first request."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.bind(kv_cache_manager)

    def get_kv_connector_stats(self) -> LayerPushStats | None:
        """Metrics since the last call. The scheduler's thread, or the engine's main thread after a step."""
        now = time.perf_counter()
        if self.connector_worker is not None:
            return LayerPushStats.joined(super().get_kv_connector_stats(), self.connector_worker.take_metrics(now))
        assert self.connector_scheduler is not None
        return LayerPushStats.joined(None, self.connector_scheduler.take_metrics(now))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> IntervalStats:
        """A report that another process has sent; empty if ``data`` is None. Front end's process."""
        return IntervalStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LayerPushPromMetrics:
        """Registers every metric. Front end's process."""
        return LayerPushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """vLLM's hides what ranks with copies of rank 0's KV report, and the scheduler would wait for them for ever."""
        assert self.connector_worker is not None
        return self.connector_worker.get_transfer_results()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """The worker's report to the scheduler. Main thread, after ``get_transfer_results``."""
        assert self.connector_worker is not None
        return self.connector_worker.report()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The step takes blocks away from requests. Engine's main thread, if the runner calls it at all."""
        assert isinstance(kv_connector_metadata, LayerwiseMetadata)
        if self.connector_worker is not None:
            self.connector_worker.revoke(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. Engine's main thread, before the first layer."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, LayerwiseMetadata)
        assert self.connector_worker is not None
        self.connector_worker.arm(connector_metadata)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002  vLLM passes by position: (name, cache, metadata)
        attn_metadata: AttentionMetadata,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """A layer's attention has been issued on this thread's stream. Engine's main thread."""
        assert self.connector_worker is not None
        self.connector_worker.step_events.layer_saved(layer_name)

    def finish_forward(self) -> None:
        """The model's forward is issued; sampling follows. Engine's main thread; the V2 model runner only.

        Every layer that no hook reported counts as saved, except those that a drafter may compute later.
        """
        assert self.connector_worker is not None
        self.connector_worker.step_events.forward_ended()

    def wait_for_save(self) -> None:
        """The step's forward is issued: every layer that no hook reported counts as saved. Engine's main thread."""
        super().wait_for_save()
        assert self.connector_worker is not None
        self.connector_worker.step_events.sweep()
