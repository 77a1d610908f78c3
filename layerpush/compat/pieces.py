"""Connections for which P prepares descriptors of its own: of pieces of blocks, or of parts of rows of several layers.

vLLM has code for engines whose blocks have another size than ours, but it is for pulls: it accepts smaller blocks of
the peer only, and where heads are not contiguous the receiver moves what it got. Here vLLM sees an engine with blocks
like ours, so it has nothing to do on D; it still checks that a token has as many bytes on both sides.

Where the layers of a block share a row, vLLM prepares one descriptor for a row. A part of a row has the same place on
both sides, in proportion to the rows. vLLM's whole pushes rely on that, too. But bytes of a row that are no layer's
need not grow with it.
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

from layerpush.compat.handshake_executor import answered_by_layerpush
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
    """``blocks`` kernel blocks of ``block_bytes``, or a part of each, ``stride`` bytes apart, from ``base`` on
    ``device``. NIXL's row of strided descriptors.
    """

    base: int
    block_bytes: int
    device: int
    stride: int
    blocks: int

    def part(self, start: int, size: int) -> Strided:
        """The bytes ``[start, start + size)`` of each block."""
        return Strided(self.base + start, size, self.device, self.stride, self.blocks)


@dataclass(frozen=True)
class StridedEngine(EngineTransferInfo):
    """vLLM's facts about an engine with other blocks, or with rows of several layers. vLLM's fields have our sizes; the
    engine's own are here.

    A block has ``pages`` kernel blocks of ``kernel_tokens`` tokens. ``regions`` are those of each of its ranks that we
    may write to, in the order of ours; ``places`` are offset and size of each layer in its row, where it says so.
    ``prepared`` are our lists of descriptors in each rank's memory. Handshake executor, then writer thread.
    """

    kernel_tokens: int = 0
    pages: int = 1
    is_layerpush: bool = False
    regions: dict[int, list[Strided]] = field(default_factory=dict, compare=False)
    places: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    prepared: dict[int, Any] = field(default_factory=dict, compare=False)


def register_strided(
    worker: NixlPushConnectorWorker, metadata: NixlAgentMetadata, tp_size: int, dcp_size: int, *, has_rows: bool
) -> StridedEngine | None:
    """Register the facts of an engine with other blocks, before vLLM does, or of any engine if ours ``has_rows`` of
    several layers. None: its blocks are like ours, or the model has states. Handshake executor.
    """
    ours = worker.block_size, worker._physical_blocks_per_logical_kv_block
    theirs = metadata.block_size, metadata.physical_blocks_per_logical_kv_block
    if (theirs == ours and not has_rows) or has_states(worker.kv_cache_config):
        return None
    topology = worker.transfer_topo
    assert topology is not None
    known = topology._engines.get((metadata.engine_id, 0))
    if isinstance(known, StridedEngine) and (known.kernel_tokens, known.pages) == theirs and known.regions:
        return known
    topology.unregister_remote_engine(metadata.engine_id)  # the facts of a handshake that failed
    info = StridedEngine(
        remote_tp_size=tp_size,
        remote_block_len=metadata.block_lens[0],
        remote_block_size=ours[0],
        remote_physical_blocks_per_logical=ours[1],
        remote_dcp_size=dcp_size,
        kernel_tokens=theirs[0],
        pages=theirs[1],
        is_layerpush=answered_by_layerpush(),
        places=metadata.packed_member_layouts,
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
    found = {base: Strided(base, size, metadata.device_id, stride, count) for base, size, stride, count in regions}
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


class Cut(NamedTuple):
    """A link by descriptors of our own: its ``routes`` have them, and each slot has ``region_blocks`` there. ``pieces``
    is None if the blocks have one size.
    """

    routes: tuple[Route, ...]
    region_blocks: tuple[int, ...]
    pieces: Pieces | None = None


def cut(
    worker: NixlPushConnectorWorker,
    engine_id: str,
    info: StridedEngine,
    layout: CacheLayout | None,
    routes: Sequence[Route],
) -> Cut:
    """Prepare descriptors for each route. Raises ``MismatchError`` if these blocks, or rows, cannot be cut."""
    if layout is None:
        raise MismatchError(f"{size_difference(worker, info)}, and our KV cache cannot be told apart by layer")
    regions = [_parts(layout, info, route.remote_rank) for route in routes]
    if size_difference(worker, info) is None:
        here, there, pieces = [_own(worker, layout)] * len(routes), regions, None
        if any([slot.block_bytes for slot in slots] != [slot.block_bytes for slot in here[0]] for slots in there):
            raise MismatchError("its rows of several layers have another size than ours")
    else:
        here, there, pieces = _pieces(worker, engine_id, info, layout, routes, regions)
    handles, agent = worker.src_xfer_handles_by_tp_ratio, worker.nixl_wrapper
    ratio = worker.transfer_topo.tp_ratio(info.remote_tp_size)
    key = ratio, -info.kernel_tokens  # not vLLM's, which releases them at shutdown
    if key not in handles:
        handles[key] = [_prepared(agent, "NIXL_INIT_AGENT", mine, worker.region_mem_types[0]) for mine in here]
    release(worker, info)
    memory = worker.dst_region_mem_types[engine_id][0]
    for route, its in zip(routes, there, strict=True):
        info.prepared[route.remote_rank] = _prepared(agent, route.agent, its, memory)
    own = tuple(
        dataclasses.replace(route, local_descriptors=local, remote_descriptors=info.prepared[route.remote_rank])
        for route, local in zip(routes, handles[key], strict=True)
    )
    return Cut(own, tuple(region.blocks for region in regions[0]), pieces)


def release(worker: NixlPushConnectorWorker, info: StridedEngine) -> None:
    """Release our lists of descriptors in an engine's memory."""
    while info.prepared:
        worker.nixl_wrapper.release_dlist_handle(info.prepared.popitem()[1])


def moved_layer(worker: NixlPushConnectorWorker, info: StridedEngine, layout: CacheLayout | None) -> str | None:
    """A layer that an engine has at another place of its rows than we; None if there is none, or if it tells none."""
    if layout is None or not layout.parts or not info.places:
        return None
    for layer in layout.layers:
        ours = layout.parts[layer.slots[0]].offset, sum(layout.regions[slot].block_bytes for slot in layer.slots)
        theirs = info.places.get(layer.name, (-1, 0))
        if [place * info.kernel_tokens for place in ours] != [place * worker.block_size for place in theirs]:
            return layer.name
    return None


def _own(worker: NixlPushConnectorWorker, layout: CacheLayout) -> list[Strided]:
    return [
        Strided(region.base, region.block_bytes, worker.device_id, region.stride, region.blocks)
        for region in layout.regions
    ]


def _parts(layout: CacheLayout, info: StridedEngine, remote_rank: int) -> list[Strided]:
    """What each of our slots has in the registered regions of one of an engine's ranks. Raises ``MismatchError``."""
    regions = info.regions[remote_rank]
    if not layout.parts:
        return list(regions)
    found, filled = [], [0] * len(regions)
    for part, ours in zip(layout.parts, layout.regions, strict=True):
        filled[part.row] += ours.block_bytes
    for part, ours in zip(layout.parts, layout.regions, strict=True):
        row = regions[part.row]
        if filled[part.row] != part.row_bytes != row.block_bytes and not info.places:
            raise MismatchError("its rows of several layers have another size than ours, and ours have gaps")
        offset, rest = divmod(part.offset * row.block_bytes, part.row_bytes)
        size, more = divmod(ours.block_bytes * row.block_bytes, part.row_bytes)
        if rest or more:
            raise MismatchError("its rows of several layers cannot be cut as ours")
        found.append(row.part(offset, size))
    return found


def _pieces(
    worker: NixlPushConnectorWorker,
    engine_id: str,
    info: StridedEngine,
    layout: CacheLayout,
    routes: Sequence[Route],
    regions: Sequence[Sequence[Strided]],
) -> tuple[list[list[Strided]], list[list[Strided]], Pieces]:
    """Rows of descriptors here and in an engine's slots, for each route, and what they are of.

    A slot has rows of descriptors: for each part of a kernel block one, or one for each strip of each head where heads
    are cut apart. A row has a descriptor for each kernel block. ``PieceRows`` in ``transport/link.py`` has their ids.
    """
    kernel, pages = worker.block_size, worker._physical_blocks_per_logical_kv_block
    tokens = math.gcd(kernel, info.kernel_tokens)
    ours, theirs = kernel // tokens, info.kernel_tokens // tokens
    if max(ours * pages, theirs * info.pages) > MAX_PIECES:
        raise MismatchError(f"{size_difference(worker, info)}: a block would have more than {MAX_PIECES} pieces")
    caches = _caches(worker, info, layout)
    plan, splits = worker.tp_mappings[engine_id], head_parts(worker, engine_id)
    together = [cache.by_token or ours == theirs for cache in caches]
    here, there = [], []
    for route, slots in zip(routes, regions, strict=True):
        mine, its = list[Strided](), list[Strided]()
        for cache, region, whole in zip(caches, slots, together, strict=True):
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
    return here, there, Pieces(tokens, ours * pages, theirs * info.pages, ours, theirs, tuple(rows))


def head_parts(worker: NixlPushConnectorWorker, engine_id: str) -> int:
    """In how many parts the ranks of a connected engine split the heads of our blocks."""
    return 1 if worker.use_mla else len({*worker.tp_mappings[engine_id].rank_to_attention_slot.values()})


def size_difference(worker: NixlPushConnectorWorker, info: EngineTransferInfo) -> str | None:
    """In which block size a connected engine differs, as the beginning of a sentence; None if in none."""
    ours = worker.block_size, worker._physical_blocks_per_logical_kv_block
    theirs = info.remote_block_size, info.remote_physical_blocks_per_logical
    if isinstance(info, StridedEngine):
        theirs = info.kernel_tokens, info.pages
    if math.prod(theirs) != math.prod(ours):
        return f"its block size is {math.prod(theirs)} tokens, ours {math.prod(ours)}"
    return None if theirs == ours else f"its kernels' block size is {theirs[0]} tokens, ours {ours[0]}"


def _caches(worker: NixlPushConnectorWorker, info: StridedEngine, layout: CacheLayout) -> list[_Cache]:
    """The cache of each slot. Raises ``MismatchError``."""
    kernel, pages = worker.block_size, worker._physical_blocks_per_logical_kv_block
    kinds, what = CacheKinds(worker.kv_cache_config), size_difference(worker, info)
    if set(kinds.block_sizes) != {kernel * pages}:
        raise MismatchError(f"{what}, and our layers have several block sizes")
    if kernel * pages % (info.kernel_tokens * info.pages) and any(kind.has_window for kind in kinds.transferred):
        raise MismatchError(f"{what}, and with windows or chunked attention ours must be a multiple of it")
    content = _tokens if kernel == info.kernel_tokens else content_of(worker, kernel, info.kernel_tokens)
    if content is None:
        backends = set(map(_module, worker.attn_backends))
        raise MismatchError(f"{what}, and a block of {', '.join(sorted(backends))} cannot be cut")
    own = _own(worker, layout)
    indices = worker._transfer_layer_region_indices or [part.row for part in layout.parts]
    found: dict[int, _Cache] = {}
    for name, slot in ((layer.name, slot) for layer in layout.layers for slot in layer.slots):
        region, index, cache = own[slot], indices[slot] if indices else slot, worker.device_kv_caches[name]
        head_step, token_step, step = (stride * cache.element_size() for stride in cache.stride()[1:])
        token_bytes = cache.shape[3] * cache.element_size()  # axes: blocks, heads, tokens, content
        heads = region.block_bytes // (kernel * token_bytes)
        by_token = heads > 1 and head_step == token_bytes
        strips = content(token_bytes, cache)
        one = _Cache(region, heads, strips, token_bytes, by_token, worker._is_region_replicated(index))
        if (
            found.setdefault(slot, one) != one
            or (cache.shape[2], step) != (kernel, cache.element_size())
            or token_step != token_bytes * (heads if by_token else 1)
            or heads * kernel * token_bytes != region.block_bytes
            or (by_token and len(strips) > 1)
        ):
            raise MismatchError(f"{what}, and the blocks of {name} cannot be cut")
    return [found[slot] for slot in range(len(layout.regions))]


def content_of(worker: NixlPushConnectorWorker, *kernels: int) -> Callable[[int, Any], Strips] | None:
    """Gives the strips of a head in kernel blocks of these sizes. None: they cannot be cut between tokens."""
    backends = set(map(_module, worker.attn_backends))
    known = {CONTENT.get(backend) for backend in backends}
    content = known.pop()
    return None if known or content is None or _is_packed(worker, kernels) else content


def _module(backend: type) -> str:
    """The module of an attention backend. Chunked attention has a subclass that vLLM makes at run time, in none."""
    return next(one.__module__.rpartition(".")[2] for one in backend.__mro__ if one.__module__ != "abc")


def _is_packed(worker: NixlPushConnectorWorker, kernels: Sequence[int]) -> bool:
    """Whether several tokens share bytes of a block of one of these sizes: in NVFP4, and in CPU_ATTN's layout for AMX,
    which vLLM chooses by the block size.
    """
    if worker.vllm_config.cache_config.cache_dtype.startswith("nvfp4"):
        return True
    if worker.use_mla or not current_platform.is_cpu():
        return False
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, size = worker.model_config.dtype, worker.model_config.get_head_size()
    return not {_get_attn_isa(dtype, tokens, size) for tokens in kernels} <= {"vec", "vec16"}


def _rows(
    region: Strided, kernel: int, cache: _Cache, first: int, heads: int, tokens: int, whole: bool
) -> list[Strided]:
    """Rows of descriptors of heads ``[first, first + heads)``,
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
    return [region.part(start, size) for start, size in starts]


def _prepared(agent: Any, owner: str, rows: Sequence[Strided], memory: str) -> Any:
    """NIXL's handle of a prepared list of descriptors in ``owner``'s memory."""
    return agent.prep_xfer_dlist(owner, np.array(rows, dtype=np.uint64), memory)
