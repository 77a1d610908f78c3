"""The layout of a worker's KV cache, from vLLM's push worker, as layerpush's own types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from layerpush.compat.kinds import CacheKinds, has_states, kind_of
from layerpush.compat.module_hooks import drafted
from layerpush.core.layout import (
    NO_STATES,
    CacheLayout,
    LayerCache,
    LayerSlots,
    LayoutError,
    Region,
    States,
    match_layers,
    named_layers,
)

if TYPE_CHECKING:
    import torch


def cache_layout(worker: NixlPushConnectorWorker, kv_caches: dict[str, torch.Tensor]) -> CacheLayout:
    """The layout of the KV cache that the worker has registered. Call it after ``register_kv_caches``.

    Raises ``LayoutError``.
    """
    bases = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    region_index: Sequence[int] = worker._transfer_layer_region_indices or range(len(bases))
    blocks = worker.dst_region_num_blocks[worker.engine_id]
    if len(blocks) != len(region_index):
        raise LayoutError(f"{len(blocks)} region sizes for {len(region_index)} descriptor regions")
    sizes, strides = worker.block_len_per_layer, worker.block_stride_per_layer
    regions = [
        Region(bases[index], sizes[index], count, strides[index] - sizes[index])
        for index, count in zip(region_index, blocks, strict=True)
    ]
    pages = worker._physical_blocks_per_logical_kv_block
    if worker._transfer_layer_names:
        return named_layers(worker._transfer_layer_names, worker._transfer_layer_group_ids, regions, pages)
    groups = worker.kv_cache_config.transfer_group_index_by_layer
    caches = [
        _layer_cache(name, groups[name], cache, spec.page_size_bytes // pages)
        for name, cache in kv_caches.items()
        if (spec := worker._layer_specs.get(name)) is not None and not kind_of(spec).is_state
    ]
    return match_layers(
        sorted(caches, key=lambda cache: _model_order(cache.name)),
        regions,
        pages,
        _states(worker, kv_caches, len(regions)),
    )


def _states(worker: NixlPushConnectorWorker, kv_caches: dict[str, torch.Tensor], first_slot: int) -> States:
    """The layers with a state, as ``NixlBaseConnectorWorker._build_mamba_local`` describes them to NIXL.

    Raises ``LayoutError`` for a state that has no region.
    """
    if not has_states(worker.kv_cache_config):
        return NO_STATES
    bases = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    shared = [bases[index] for index in worker._ssm_region_indices]
    parts = state_parts(worker)
    regions = [Region(base + offset, size, worker._logical_num_blocks) for base in shared for offset, size in parts]
    layers = []
    for name in sorted(kv_caches, key=_model_order):
        if (spec := worker._layer_specs.get(name)) is not None and kind_of(spec).is_state:
            if (start := kv_caches[name].data_ptr()) not in shared:
                raise LayoutError(f"the state of layer {name} at {start:#x} lies in no registered region")
            slot = first_slot + shared.index(start) * len(parts)
            group = worker.kv_cache_config.transfer_group_index_by_layer[name]
            layers.append(LayerSlots(name, group, tuple(range(slot, slot + len(parts))), calls_hook=False))
    return States(tuple(layers), tuple(regions))


def drafted_states(worker: NixlPushConnectorWorker) -> frozenset[str]:
    """The layers with a state, if there are drafts: once it has sampled, vLLM may copy their states."""
    if worker.vllm_config.speculative_config is None:
        return frozenset()
    return frozenset(name for name, spec in worker._layer_specs.items() if kind_of(spec).is_state)


def check_stage(worker: NixlPushConnectorWorker, kv_caches: dict[str, torch.Tensor]) -> None:
    """Raises ``NotImplementedError`` if vLLM would take a drafter's layers on a stage of a pipeline for the model's.

    Where it does not find layers by name, it computes a stage's place among D's regions from their number. Call it
    before ``register_kv_caches``.
    """
    if worker.pp_size > 1 and not worker._requires_layer_name_routing() and drafted(worker.vllm_config, kv_caches):
        raise NotImplementedError(
            "vLLM's NIXL connectors transfer no drafter's layers from a pipeline of this model: set "
            "pipeline_parallel_size to 1, or leave out speculative_config on both sides"
        )


def check_transferable(worker: NixlPushConnectorWorker, kv_caches: dict[str, torch.Tensor]) -> None:
    """Raises ``NotImplementedError`` if vLLM cannot transfer this KV cache, or has described other blocks to NIXL.

    vLLM takes the blocks of a state to lie one after the other, even in a row with pages of other layers, and attention
    that shares the first page's address gets the same stride. Without attention, ``_build_fa_remote`` of vLLM ends each
    handshake with ``StopIteration``. Call it after ``register_kv_caches``.
    """
    kinds = CacheKinds(worker.kv_cache_config).transferred
    if kinds and all(kind.is_state for kind in kinds):
        raise NotImplementedError(
            "all layers have a state, and vLLM's NIXL connectors transfer no model without attention"
        )
    bases = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    for name, cache in kv_caches.items() if has_states(worker.kv_cache_config) else ():
        if cache.ndim > 1 and cache.data_ptr() in bases:
            is_state = kind_of(worker._layer_specs[name]).is_state
            blocks = worker._physical_blocks_per_logical_kv_block if is_state else 1
            stride = worker.block_stride_per_layer[bases.index(cache.data_ptr())] * blocks
            if stride != cache.stride(0) * cache.element_size():
                raise NotImplementedError(
                    f"vLLM transfers wrong blocks of layer {name} in the KV cache layout {worker.kv_cache_layout}: "
                    "with layers that have a state, set VLLM_KV_CACHE_LAYOUT=LBHNC, or leave it out"
                )


def state_parts(worker: NixlPushConnectorWorker) -> list[tuple[int, int]]:
    """Offset and size in bytes of each part of a state in its block: those of the convolution, then the other state."""
    if not has_states(worker.kv_cache_config):
        return []
    assert worker._conv_decomp is not None
    return [*worker._conv_decomp.local_conv_offsets, worker._mamba_ssm_size]


def layer_bytes(worker: NixlPushConnectorWorker) -> int:
    """Bytes of KV that the largest step of this engine writes in a layer of this worker."""
    specs: list[Any] = []
    for group in worker.kv_cache_config.transfer_groups:
        spec = group.kv_cache_spec
        specs += spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    tokens = worker.vllm_config.scheduler_config.max_num_batched_tokens
    return max((-(-tokens * spec.page_size_bytes // spec.block_size) for spec in specs), default=0)


def slot_views(layout: CacheLayout, kv_caches: dict[str, Any]) -> list[torch.Tensor]:
    """A view of each region, in descriptor order, as ``uint8 [kernel blocks, block bytes]``.

    Raises ``LayoutError`` for a region that lies in no tensor.
    """
    import torch

    storages = {}
    for cache in kv_caches.values():
        storage = cache.untyped_storage()
        storages[storage.data_ptr()] = (storage, cache.device)
    views = []
    for region in layout.regions:
        base = region.base
        found = next(
            ((start, *rest) for start, rest in storages.items() if start <= base < start + rest[0].nbytes()), None
        )
        if found is None or base + region.blocks * region.stride - region.gap > found[0] + found[1].nbytes():
            raise LayoutError(f"the region at {base:#x} lies in no tensor of the KV cache")
        start, storage, device = found
        view = torch.empty(0, dtype=torch.uint8, device=device)
        shape = region.blocks, region.block_bytes
        views.append(view.set_(storage, base - start, shape, (region.stride, 1)))
    return views


def device_of(kv_caches: dict[str, Any]) -> torch.device:
    """The device of the KV cache. A Mamba layer's cache is a sequence of tensors."""
    cache = next(iter(kv_caches.values()))
    tensor: torch.Tensor = cache[0] if isinstance(cache, list | tuple) else cache
    return tensor.device


def _span(cache: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    return int((last + 1) * cache.element_size())


def _layer_cache(name: str, group: int, cache: torch.Tensor, page_bytes: int) -> LayerCache:
    size, runs = cache.element_size(), (0,)
    contiguous = size
    for stride, length in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if stride * size == contiguous and len(runs) == 1:
            contiguous *= length
        elif length > 1:
            runs = tuple(run + step * stride * size for step in range(length) for run in runs)
    found = LayerCache(name, group, cache.data_ptr(), _span(cache), page_bytes)
    is_padded = len(runs) > 1 and len(runs) * contiguous != page_bytes
    return found if is_padded else replace(found, stride=cache.stride(0) * size, runs=runs)


def _model_order(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
