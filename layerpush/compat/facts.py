"""Facts about an engine's model and caches, from vLLM's push worker and scheduler, as layerpush's own types."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from layerpush.core.layout import CacheLayout, LayerCache, LayoutError, Region, match_layers, named_layers
from layerpush.transport.nixl import SPLIT_AT

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def engine_fallback(side: NixlPushConnectorScheduler | NixlPushConnectorWorker) -> str | None:
    """The reason why this engine must push whole requests, or None. Its scheduler and its workers find the same."""
    if side.use_host_buffer:
        return "the KV cache is staged in a host buffer (kv_buffer_device=cpu)"
    if side._has_mamba:
        return "the model has Mamba layers, whose state is not written block by block"
    return None


def worker_fallback(worker: NixlPushConnectorWorker) -> str | None:
    """The reason why this worker must push whole requests; None if there is none. ``cache_layout`` may find another."""
    if (reason := engine_fallback(worker)) is not None:
        return reason
    if worker.pcp_size > 1:
        return "prefill context parallelism shards the KV of a layer over ranks"
    if worker._is_csa_linear or worker._scratch_region_indices:
        return "the model has scratch or shared-state regions that belong to no layer"
    if any(group.host_resident for group in worker.kv_cache_config.transfer_groups):
        return "part of the KV cache lives in host memory"
    return None


def cache_layout(worker: NixlPushConnectorWorker, kv_caches: dict[str, torch.Tensor]) -> CacheLayout:
    """The layout of the KV cache that the worker has registered. Call it after ``register_kv_caches``.

    Raises ``LayoutError``.
    """
    bases = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    region_index: Sequence[int] = worker._transfer_layer_region_indices or range(len(bases))
    blocks = worker.dst_region_num_blocks[worker.engine_id]
    if len(blocks) != len(region_index):
        raise LayoutError(f"{len(blocks)} region sizes for {len(region_index)} descriptor regions")
    regions = [
        Region(bases[index], worker.block_len_per_layer[index], count)
        for index, count in zip(region_index, blocks, strict=True)
    ]
    pages = worker._physical_blocks_per_logical_kv_block
    if worker._transfer_layer_names:
        return named_layers(worker._transfer_layer_names, worker._transfer_layer_group_ids, regions, pages)
    groups = worker.kv_cache_config.transfer_group_index_by_layer
    caches = [
        LayerCache(name, groups[name], cache.data_ptr(), _span(cache), spec.page_size_bytes // pages)
        for name, cache in kv_caches.items()
        if (spec := worker._layer_specs.get(name)) is not None
    ]
    return match_layers(sorted(caches, key=_model_order), regions, pages)


def runs_in_microbatches(vllm_config: VllmConfig) -> bool:
    """Whether a step runs in microbatches: a layer's hook then fires before all of the layer is computed."""
    return bool(vllm_config.parallel_config.use_ubatching)


def drafts(vllm_config: VllmConfig) -> bool:
    """Whether a drafter may compute layers of its own after the model's forward."""
    return vllm_config.speculative_config is not None


def split_at(worker: NixlPushConnectorWorker, vllm_config: VllmConfig) -> float:
    """NIXL may spread a WRITE of so many descriptors, or more, over several endpoints. ``inf``: it never does.

    0 for another backend than UCX: the number is not known.
    """
    assert vllm_config.kv_transfer_config is not None
    if worker.nixl_backends != ["UCX"]:
        return 0
    threads = vllm_config.kv_transfer_config.get_from_extra_config("num_threads", 4)
    return SPLIT_AT if threads else math.inf


def only_decodes(vllm_config: VllmConfig) -> bool:
    """Whether this engine is a decode engine only, so that it never writes into another engine's memory."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and not transfer.is_kv_producer


def device_of(kv_caches: dict[str, Any]) -> torch.device:
    """The device of the KV cache. A Mamba layer's cache is a sequence of tensors."""
    cache = next(iter(kv_caches.values()))
    tensor: torch.Tensor = cache[0] if isinstance(cache, list | tuple) else cache
    return tensor.device


def _span(cache: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    return int((last + 1) * cache.element_size())


def _model_order(cache: LayerCache) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", cache.name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def block_sizes(kv_cache_config: Any) -> tuple[int, ...]:
    """Tokens per block of each transferable KV cache group."""
    return tuple(group.kv_cache_spec.block_size for group in kv_cache_config.transfer_groups)


def slot_views(worker: NixlPushConnectorWorker, kv_caches: dict[str, Any]) -> list[torch.Tensor]:
    """A view of each region, in descriptor order, as ``uint8 [kernel blocks, block bytes]``.

    Raises ``LayoutError`` for a region that lies in no tensor.
    """
    import torch

    bases = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    storages = {}
    for cache in kv_caches.values():
        storage = cache.untyped_storage()
        storages[storage.data_ptr()] = (storage, cache.device)
    views = []
    region_index: Sequence[int] = worker._transfer_layer_region_indices or range(len(bases))
    for index, blocks in zip(region_index, worker.dst_region_num_blocks[worker.engine_id], strict=True):
        base, size, stride = bases[index], worker.block_len_per_layer[index], worker.block_stride_per_layer[index]
        found = next(
            ((start, *rest) for start, rest in storages.items() if start <= base < start + rest[0].nbytes()), None
        )
        if found is None or base + (blocks - 1) * stride + size > found[0] + found[1].nbytes():
            raise LayoutError(f"region {index} at {base:#x} lies in no tensor of the KV cache")
        start, storage, device = found
        view = torch.empty(0, dtype=torch.uint8, device=device)
        views.append(view.set_(storage, base - start, (blocks, size), (stride, 1)))
    return views
