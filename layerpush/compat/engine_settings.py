"""Settings of an engine that decide how layerpush pushes, from vLLM's configuration, scheduler and worker."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled

from layerpush.compat.patches import VARIABLE, is_on
from layerpush.transport.nixl import SPLIT_AT

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_fallback(side: NixlPushConnectorScheduler | NixlPushConnectorWorker) -> str | None:
    """The reason why this engine must push whole requests, or None. Its scheduler and its workers find the same."""
    if side.use_host_buffer:
        return "the KV cache is staged in a host buffer (kv_buffer_device=cpu)"
    if not is_on("early-revocation") and side.vllm_config.use_v2_model_runner:
        return f"{VARIABLE} leaves out early-revocation, and vLLM uses its V2 model runner"
    return None


def worker_fallback(worker: NixlPushConnectorWorker) -> str | None:
    """The reason why this worker must push whole requests; None if there is none. ``cache_layout`` may find another."""
    if (reason := engine_fallback(worker)) is not None:
        return reason
    if worker._is_csa_linear or worker._scratch_region_indices:
        return "the model has scratch or shared-state regions that belong to no layer"
    if any(group.host_resident for group in worker.kv_cache_config.transfer_groups):
        return "part of the KV cache lives in host memory"
    return None


def microbatches(vllm_config: VllmConfig) -> int:
    """How many microbatches a step may be split into; 1 if none is."""
    parallel = vllm_config.parallel_config
    return int(parallel.num_ubatches) if parallel.use_ubatching else 1


def microbatch() -> int | None:
    """The number of the microbatch that runs on this thread; None in a step that is not split."""
    return dbo_current_ubatch_id() if dbo_enabled() else None


def captured_tokens(vllm_config: VllmConfig) -> int:
    """The most tokens of a step that may replay a CUDA graph. 0: there are no graphs, or the size is not known."""
    return int(getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0)


def returns_aux_outputs(vllm_config: VllmConfig) -> bool:
    """Whether answers carry more than tokens, such as the experts that routed each token."""
    config = getattr(vllm_config, "aux_output_config", None)
    return bool(getattr(config, "enabled", False))


def split_at(worker: NixlPushConnectorWorker, vllm_config: VllmConfig) -> float:
    """The least number of descriptors of a WRITE that NIXL may spread over several endpoints. ``inf``: it never does.

    0 for another backend than UCX: the number is not known.
    """
    assert vllm_config.kv_transfer_config is not None
    if not ends_with_flush(worker):
        return 0
    return SPLIT_AT if vllm_config.kv_transfer_config.get_from_extra_config("num_threads", 0) else math.inf


def use_one_thread(vllm_config: VllmConfig) -> None:
    """Set ``num_threads`` to 0 for vLLM, whose default is 4, unless the operator has set it.

    Over TCP, under load, pushes with large WRITEs stood still with NIXL's own threads. The cause is likely these, but
    that is not proven. Nothing confirms the end of such a WRITE after a failure.
    """
    assert vllm_config.kv_transfer_config is not None
    vllm_config.kv_transfer_config.kv_connector_extra_config.setdefault("num_threads", 0)


def ends_with_flush(worker: NixlPushConnectorWorker) -> bool:
    """Whether NIXL flushes the peer's endpoint before a WRITE ends, so that the WRITE has landed then."""
    return bool(worker.nixl_backends == ["UCX"])


def only_decodes(vllm_config: VllmConfig) -> bool:
    """Whether this engine is a decode engine only, so that it never writes into another engine's memory."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and not transfer.is_kv_producer
