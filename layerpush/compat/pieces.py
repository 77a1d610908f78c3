"""Connections to engines whose blocks have another size than ours: their facts, and descriptors of pieces of blocks.

vLLM has code for such engines, but it is for pulls: it accepts smaller blocks of the peer only, and where heads are not
contiguous the receiver moves what it got. Here vLLM sees an engine with blocks like ours, so it has nothing to do on D;
it still checks that a token has as many bytes on both sides. P prepares descriptors of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.platforms import current_platform

from layerpush.compat.kinds import CacheKinds, has_states
from layerpush.core.layout import CacheLayout
from layerpush.core.pieces import Pieces
from layerpush.core.write import MismatchError
from layerpush.transport.base import Route

MAX_PIECES = 256
"""In a block of one engine."""

Strips = tuple[int, ...]
"""What a block holds for one head, in order: each strip has all tokens of the block, with so many bytes for each."""


def _tokens(content: int, _: Any) -> Strips:
    return (content,)


def _transposed_keys(content: int, cache: Any) -> Strips:
    """Each element of the keys is a strip, then come the values."""
    return (*[cache.element_size()] * (cache.shape[3] // 2), content // 2)


CONTENT: dict[str, Callable[[int, Any], Strips]] = {
    "cpu_attn": _transposed_keys,
    "cpu_mla": _tokens,
    "flash_attn": _tokens,
    "flashattn_mla": _tokens,
    "flashinfer": _tokens,
    "flashinfer_mla": _tokens,
    "flex_attention": _tokens,
    "triton_attn": _tokens,
    "triton_mla": _tokens,
}
"""The strips of a head by the module of vLLM's attention backend, from the bytes of a token and the layer's cache."""


class Strided(NamedTuple):
    """A region: ``blocks`` kernel blocks of ``block_bytes``, ``stride`` bytes apart, from ``base`` on ``device``."""

    base: int
    block_bytes: int
    stride: int
    blocks: int
    device: int


@dataclass(frozen=True)
class OtherBlocks(EngineTransferInfo):
    """vLLM's facts about an engine with other blocks. vLLM's fields have our sizes; the engine's own are here.

    A block has ``pages`` kernel blocks of ``kernel_tokens`` tokens. ``regions`` are those of each of its ranks that we
    may write to, in the order of our slots.
    """

    kernel_tokens: int = 0
    pages: int = 1
    is_layerpush: bool = False
    regions: dict[int, list[Strided]] = field(default_factory=dict, compare=False)


def other_blocks(
    worker: NixlPushConnectorWorker, metadata: NixlAgentMetadata, tp_size: int, dcp_size: int, *, is_layerpush: bool
) -> OtherBlocks | None:
    """Register the facts of an engine with other blocks, before vLLM does. None: its blocks are like ours, or the model
    has states. Handshake executor.
    """
    ours = worker.block_size, worker._physical_blocks_per_logical_kv_block
    theirs = metadata.block_size, metadata.physical_blocks_per_logical_kv_block
    if theirs == ours or has_states(worker.kv_cache_config):
        return None
    topology = worker.transfer_topo
    assert topology is not None
    known = topology._engines.get((metadata.engine_id, 0))
    if isinstance(known, OtherBlocks) and (known.kernel_tokens, known.pages) == theirs and known.regions:
        return known
    topology.unregister_remote_engine(metadata.engine_id)  # the facts of a handshake that failed
    info = OtherBlocks(
        remote_tp_size=tp_size,
        remote_block_len=metadata.block_lens[0],
        remote_block_size=ours[0],
        remote_physical_blocks_per_logical=ours[1],
        remote_dcp_size=dcp_size,
        kernel_tokens=theirs[0],
        pages=theirs[1],
        is_layerpush=is_layerpush,
    )
    topology.register_remote_engine(metadata.engine_id, info)
    return info


def disguised(worker: NixlPushConnectorWorker, metadata: NixlAgentMetadata) -> NixlAgentMetadata:
    """``metadata`` as if its blocks were like ours. Only one block per region: vLLM's descriptors are not used."""
    lengths = [length * worker.block_size // metadata.block_size for length in metadata.block_lens]
    return dataclasses.replace(
        metadata,
        block_size=worker.block_size,
        physical_blocks_per_logical_kv_block=worker._physical_blocks_per_logical_kv_block,
        block_lens=lengths,
        block_strides=list(lengths),
        region_num_blocks=[1] * len(lengths),
    )


def regions_of(metadata: NixlAgentMetadata, bases: Sequence[int]) -> list[Strided]:
    """The engine's regions that begin at ``bases``."""
    counts = metadata.region_num_blocks or [metadata.num_blocks] * len(metadata.block_lens)
    regions = zip(metadata.kv_caches_base_addr, metadata.block_lens, metadata.block_strides, counts, strict=True)
    found = {base: Strided(base, size, stride, count, metadata.device_id) for base, size, stride, count in regions}
    return [found[base] for base in bases]


class _Cache(NamedTuple):
    """The KV cache of a slot: ``heads`` in a block, each with ``token_bytes`` for a token, in ``strips``.

    The tokens of a head are contiguous in a block, or else, ``by_token``, the heads of a token. ``is_replicated``: MLA.
    """

    region: Strided
    heads: int
    strips: Strips
    token_bytes: int
    by_token: bool
    is_replicated: bool


def cut(
    worker: NixlPushConnectorWorker,
    engine_id: str,
    info: OtherBlocks,
    layout: CacheLayout | None,
    routes: Sequence[Route],
) -> tuple[Pieces, tuple[Route, ...]]:
    """Prepare descriptors of pieces for each route. Raises ``MismatchError`` if these blocks cannot be cut.

    A slot has rows of descriptors: for each part of a kernel block one, or one for each strip of each head where heads
    are cut apart. A row has a descriptor for each kernel block. ``PieceRows`` in ``transport/link.py`` has their ids.
    """
    kernel, pages = worker.block_size, worker._physical_blocks_per_logical_kv_block
    tokens = math.gcd(kernel, info.kernel_tokens)
    ours, theirs = kernel // tokens, info.kernel_tokens // tokens
    if max(ours * pages, theirs * info.pages) > MAX_PIECES:
        raise MismatchError(f"{size_difference(worker, info)}: a block would have more than {MAX_PIECES} pieces")
    caches = _caches(worker, info, layout)
    plan, ratio = worker.tp_mappings[engine_id], worker.transfer_topo.tp_ratio(info.remote_tp_size)
    splits = len(plan.source_ranks_per_group[0]) if ratio < 0 else 1
    together = [cache.by_token or ours == theirs for cache in caches]
    here, there = [], []
    for route in routes:
        mine, its = [], []
        for cache, region, whole in zip(caches, info.regions[route.remote_rank], together, strict=True):
            heads, first, offset = cache.heads, 0, plan.rank_offset_factor * cache.heads
            if cache.is_replicated:
                offset = 0
            elif splits > 1:
                heads //= splits
                first = heads * plan.rank_to_attention_slot[route.remote_rank]
            room = region.block_bytes - (offset + heads) * info.kernel_tokens * cache.token_bytes
            if room < 0 or (cache.by_token and (room or first or offset)):
                raise MismatchError(f"{size_difference(worker, info)}, and its heads are split in another way")
            mine += _rows(cache.region, kernel, cache, first, heads, tokens, whole)
            its += _rows(region, info.kernel_tokens, cache, offset, heads, tokens, whole)
        here.append(mine)
        there.append(its)
    rows = [
        1 if whole else len(cache.strips) * (cache.heads if cache.is_replicated else cache.heads // splits)
        for whole, cache in zip(together, caches, strict=True)
    ]
    pieces = Pieces(tokens, ours * pages, theirs * info.pages, ours, theirs, tuple(rows))
    handles, agent = worker.src_xfer_handles_by_tp_ratio, worker.nixl_wrapper
    key = ratio, -info.kernel_tokens  # not vLLM's, which releases them at shutdown
    if key not in handles:
        handles[key] = [_prepared(agent, "NIXL_INIT_AGENT", mine, worker.region_mem_types[0]) for mine in here]
    cut_routes = []
    for route, local, its in zip(routes, handles[key], there, strict=True):
        remote = _prepared(agent, route.agent, its, worker.dst_region_mem_types[engine_id][0])
        lists = worker.dst_xfer_side_handles[engine_id]  # vLLM releases them with the connection
        agent.release_dlist_handle(lists[route.remote_rank])
        lists[route.remote_rank] = remote
        cut_routes.append(dataclasses.replace(route, local_descriptors=local, remote_descriptors=remote))
    return pieces, tuple(cut_routes)


def size_difference(worker: NixlPushConnectorWorker, info: EngineTransferInfo) -> str | None:
    """In which block size a connected engine differs, as the beginning of a sentence; None if in none."""
    ours = worker.block_size, worker._physical_blocks_per_logical_kv_block
    theirs = info.remote_block_size, info.remote_physical_blocks_per_logical
    if isinstance(info, OtherBlocks):
        theirs = info.kernel_tokens, info.pages
    if math.prod(theirs) != math.prod(ours):
        return f"its block size is {math.prod(theirs)} tokens, ours {math.prod(ours)}"
    return None if theirs == ours else f"its kernels' block size is {theirs[0]} tokens, ours {ours[0]}"


def _caches(worker: NixlPushConnectorWorker, info: OtherBlocks, layout: CacheLayout | None) -> list[_Cache]:
    """The cache of each slot. Raises ``MismatchError``."""
    kernel, pages = worker.block_size, worker._physical_blocks_per_logical_kv_block
    kinds, what = CacheKinds(worker.kv_cache_config), size_difference(worker, info)
    if layout is None:
        raise MismatchError(f"{what}, and our KV cache cannot be told apart by layer")
    if set(kinds.block_sizes) != {kernel * pages}:
        raise MismatchError(f"{what}, and our layers have several block sizes")
    if kernel * pages % (info.kernel_tokens * info.pages) and any(kind.has_window for kind in kinds.transferred):
        raise MismatchError(f"{what}, and with windows or chunked attention ours must be a multiple of it")
    backends = set(map(_module, worker.attn_backends))
    known = [CONTENT[backend] for backend in backends if backend in CONTENT]
    same_kernel = kernel == info.kernel_tokens  # then no kernel block is cut
    if not same_kernel and (len(known) < len(backends) or len(set(known)) > 1 or _is_packed(worker, info)):
        raise MismatchError(f"{what}, and a block of {', '.join(sorted(backends))} cannot be cut")
    content = _tokens if same_kernel else known[0]
    indices = worker._transfer_layer_region_indices or range(len(layout.regions))
    found: dict[int, _Cache] = {}
    for name, slot in ((layer.name, slot) for layer in layout.layers for slot in layer.slots):
        region, index, cache = layout.regions[slot], indices[slot], worker.device_kv_caches[name]
        head_step, token_step, step = (stride * cache.element_size() for stride in cache.stride()[1:])
        token_bytes = cache.shape[3] * cache.element_size()  # axes: blocks, heads, tokens, content
        heads = region.block_bytes // (kernel * token_bytes)
        by_token = heads > 1 and head_step == token_bytes
        strips = content(token_bytes, cache)
        strided = Strided(
            region.base, region.block_bytes, worker.block_stride_per_layer[index], region.blocks, worker.device_id
        )
        one = _Cache(strided, heads, strips, token_bytes, by_token, worker._is_region_replicated(index))
        if (
            found.setdefault(slot, one) != one
            or (cache.shape[2], step) != (kernel, cache.element_size())
            or token_step != token_bytes * (heads if by_token else 1)
            or heads * kernel * token_bytes != region.block_bytes
            or (by_token and len(strips) > 1)
        ):
            raise MismatchError(f"{what}, and the blocks of {name} cannot be cut")
    return [found[slot] for slot in range(len(layout.regions))]


def _module(backend: type) -> str:
    """The module of an attention backend. Chunked attention has a subclass that vLLM makes at run time, in none."""
    return next(one.__module__.rpartition(".")[2] for one in backend.__mro__ if one.__module__ != "abc")


def _is_packed(worker: NixlPushConnectorWorker, info: OtherBlocks) -> bool:
    """Whether several tokens share bytes of a block on one side: in NVFP4, and in CPU_ATTN's layout for AMX, which
    vLLM chooses by the block size.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, size = worker.model_config.dtype, worker.model_config.get_head_size()
    cpu = current_platform.is_cpu() and not worker.use_mla
    isas = {_get_attn_isa(dtype, tokens, size) for tokens in (worker.block_size, info.kernel_tokens)} if cpu else set()
    return not isas <= {"vec", "vec16"} or worker.vllm_config.cache_config.cache_dtype.startswith("nvfp4")


def _rows(
    region: Strided, kernel: int, cache: _Cache, first: int, heads: int, tokens: int, whole: bool
) -> list[tuple[int, int, int, int, int]]:
    """NIXL's rows of strided descriptors: address, bytes, device, stride, count. Of heads ``[first, first + heads)``,
    ``whole``: all in one row.
    """
    if whole:
        start, size = first * kernel * cache.token_bytes, tokens * cache.token_bytes * heads
        starts = [(start + part * size, size) for part in range(kernel // tokens)]
    else:
        befores = [0, *itertools.accumulate(cache.strips)]
        starts = [
            (((first + head) * cache.token_bytes + before) * kernel + part * tokens * strip, tokens * strip)
            for head in range(heads)
            for before, strip in zip(befores, cache.strips, strict=False)
            for part in range(kernel // tokens)
        ]
    return [(region.base + start, size, region.device, region.stride, region.blocks) for start, size in starts]


def _prepared(agent: Any, owner: str, rows: list[tuple[int, int, int, int, int]], memory: str) -> Any:
    """NIXL's handle of a prepared list of descriptors in ``owner``'s memory."""
    return agent.prep_xfer_dlist(owner, np.array(rows, dtype=np.uint64), memory)
