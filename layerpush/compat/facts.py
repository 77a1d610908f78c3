"""Facts about an engine's model and caches, from vLLM's push worker and scheduler, as layerpush's own types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import clip_ssm_state_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from layerpush.compat.patches import VARIABLE, is_on
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
from layerpush.core.step_plan import WHOLE_PROMPT
from layerpush.transport.nixl import SPLIT_AT

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def engine_fallback(side: NixlPushConnectorScheduler | NixlPushConnectorWorker) -> str | None:
    """The reason why this engine must push whole requests, or None. Its scheduler and its workers find the same."""
    if side.use_host_buffer:
        return "the KV cache is staged in a host buffer (kv_buffer_device=cpu)"
    if not is_on("early-revocation") and side.vllm_config.use_v2_model_runner:
        return f"{VARIABLE} leaves out early-revocation, and vLLM uses its V2 model runner"
    if not side._has_mamba:
        return None
    specs = [group.kv_cache_spec for group in side.kv_cache_config.transfer_groups]
    if any(isinstance(spec, MambaSpec) and spec.num_speculative_blocks for spec in specs):
        return "the Mamba layers have a state for each draft token"
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


def layer_bytes(worker: NixlPushConnectorWorker) -> int:
    """Bytes of KV that the largest step of this engine writes in a layer of this worker."""
    specs: list[Any] = []
    for group in worker.kv_cache_config.transfer_groups:
        spec = group.kv_cache_spec
        specs += spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    tokens = worker.vllm_config.scheduler_config.max_num_batched_tokens
    return max((-(-tokens * spec.page_size_bytes // spec.block_size) for spec in specs), default=0)


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
        if (spec := worker._layer_specs.get(name)) is not None and not isinstance(spec, MambaSpec)
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
    if not worker._has_mamba:
        return NO_STATES
    bases = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    shared = [bases[index] for index in worker._ssm_region_indices]
    parts = state_parts(worker)
    regions = [Region(base + offset, size, worker._logical_num_blocks) for base in shared for offset, size in parts]
    layers = []
    for name in sorted(kv_caches, key=_model_order):
        if isinstance(worker._layer_specs.get(name), MambaSpec):
            if (start := kv_caches[name].data_ptr()) not in shared:
                raise LayoutError(f"the state of layer {name} at {start:#x} lies in no registered region")
            slot = first_slot + shared.index(start) * len(parts)
            group = worker.kv_cache_config.transfer_group_index_by_layer[name]
            layers.append(LayerSlots(name, group, tuple(range(slot, slot + len(parts))), is_state=True))
    return States(tuple(layers), tuple(regions))


def has_states(worker: NixlPushConnectorWorker) -> bool:
    """Whether a layer has a state (Mamba, GDN) in place of KV."""
    return bool(worker._has_mamba)


def state_parts(worker: NixlPushConnectorWorker) -> list[tuple[int, int]]:
    """Offset and size in bytes of each part of a state in its block: those of the convolution, then the other state."""
    if not worker._has_mamba:
        return []
    assert worker._conv_decomp is not None
    return [*worker._conv_decomp.local_conv_offsets, worker._mamba_ssm_size]


def runs_in_microbatches(vllm_config: VllmConfig) -> bool:
    """Whether a step runs in microbatches: a layer's hook then fires before all of the layer is computed."""
    return bool(vllm_config.parallel_config.use_ubatching)


def captured_tokens(vllm_config: VllmConfig) -> int:
    """The most tokens of a step that may replay a CUDA graph. 0: there are no graphs, or the size is not known."""
    return int(getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0)


def returns_aux_outputs(vllm_config: VllmConfig) -> bool:
    """Whether answers carry more than tokens, such as the experts that routed each token."""
    config = getattr(vllm_config, "aux_output_config", None)
    return bool(getattr(config, "enabled", False))


def drafted(vllm_config: VllmConfig, names: Iterable[str]) -> frozenset[str]:
    """Those of the layers ``names`` that a drafter may compute after the model's forward."""
    if vllm_config.speculative_config is None:
        return frozenset()
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return frozenset(name for name in names if is_drafted(name, layers))


def is_drafted(name: str, layers: int) -> bool:
    """Whether a layer may be a drafter's: those have numbers after the model's ``layers``, or a prefix."""
    found = re.search(r"\blayers\.(\d+)\.", name)
    return found is None or int(found[1]) >= layers or "draft" in name or "mtp" in name


def split_at(worker: NixlPushConnectorWorker, vllm_config: VllmConfig) -> float:
    """The least number of descriptors of a WRITE that NIXL may spread over several endpoints. ``inf``: it never does.

    0 for another backend than UCX: the number is not known.
    """
    assert vllm_config.kv_transfer_config is not None
    if not ends_with_flush(worker):
        return 0
    threads = vllm_config.kv_transfer_config.get_from_extra_config("num_threads", 4)
    return SPLIT_AT if threads else math.inf


def ends_with_flush(worker: NixlPushConnectorWorker) -> bool:
    """Whether NIXL flushes the peer's endpoint before a WRITE ends, so that the WRITE has landed then."""
    return bool(worker.nixl_backends == ["UCX"])


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


def _model_order(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def block_sizes(kv_cache_config: Any) -> tuple[int, ...]:
    """Tokens per block of each transferable KV cache group."""
    specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
    return tuple(WHOLE_PROMPT if isinstance(spec, MambaSpec) else spec.block_size for spec in specs)


def transfer_tables(kv_cache_config: Any, tables: Sequence[list[int]]) -> list[list[int]]:
    """A request's block ids in token order, for each transferable KV cache group: of states only the newest, which vLLM
    transfers, too. The others are in the prefix cache, or are null.
    """
    groups = kv_cache_config.transfer_groups
    return [
        clip_ssm_state_blocks(table, group.kv_cache_spec.num_speculative_blocks)
        if isinstance(group.kv_cache_spec, MambaSpec)
        else table
        for group, table in zip(groups, kv_cache_config.select_transfer_block_ids(tables), strict=True)
    ]


def tokens_to_load(kv_cache_config: Any, tokens: int) -> int:
    """How many of a prompt's tokens a decode engine loads. It may compute the last one again, to sample from it.

    vLLM allocates the blocks of a load for the token that follows. If the last token attends to a block that vLLM
    drops then, the engine loads all tokens but the last one. P's blocks are the same. 0: they would not be the same, so
    the engine computes the prompt itself.
    """
    if not any(dropped_after(kv_cache_config, tokens)):
        return tokens
    return 0 if any((tokens - 1) % size == 0 for size in block_sizes(kv_cache_config)) else tokens - 1


def dropped_after(kv_cache_config: Any, tokens: int) -> list[range]:
    """For each KV cache group, the indices of the blocks that the last of a prompt's tokens attends to, and the token
    after it does not.
    """
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    specs = [getattr(spec, "first_spec", spec) for spec in groups]
    return [
        range(*(_first_attended(spec, position) // spec.block_size for position in (tokens - 1, tokens)))
        for spec in specs
    ]


def _first_attended(spec: KVCacheSpec, position: int) -> int:
    """The first token that the token at this position attends to in a layer."""
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position - position % int(spec.attention_chunk_size)
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - int(spec.sliding_window) + 1)
    return 0


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
