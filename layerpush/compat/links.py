"""Finds out from vLLM's tensor-parallel logic whether and where this rank writes into a connected decode engine.

Writer thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

from layerpush.compat.cache_layout import state_parts
from layerpush.compat.kinds import has_states, kinds_of
from layerpush.compat.pieces import Cut, StridedEngine, cut, head_parts, moved_layer, size_difference
from layerpush.core.layout import CacheLayout
from layerpush.core.replica import Replica
from layerpush.core.write import MismatchError
from layerpush.transport.base import Route
from layerpush.transport.link import Link


class RankTarget(NamedTuple):
    """A WRITE that vLLM would post: which blocks to which rank, and the descriptor lists of both sides."""

    spec: ReadSpec
    local_descriptors: int
    remote_descriptors: int


def discover_link(
    worker: NixlPushConnectorWorker,
    engine_id: str,
    note_writes: Callable[[ReqMeta], list[RankTarget]],
    layout: CacheLayout | None,
) -> Link:
    """The link to a connected decode engine. ``note_writes`` returns the WRITEs that vLLM would post for a request.
    ``layout`` is None if our cache cannot be told apart by layer.

    Raises ``MismatchError`` if the block sizes differ and the blocks cannot be cut.
    """
    reason = refusal(worker, engine_id)
    targets: list[RankTarget] = []
    if reason is None:
        try:
            targets = note_writes(_sample_request(worker, engine_id))
        except (NotImplementedError, AssertionError) as error:
            reason = f"vLLM cannot map it: {error}"
    if reason is None and not all(all(target.spec.local_block_ids) for target in targets):
        reason = "some KV cache groups go to other ranks than the rest"
    if reason is not None:
        return Link(engine_id, (), (), refusal=reason)
    agents = worker._remote_agents[engine_id]
    routes = tuple(
        Route(agent_name(agents[(0, spec.remote_rank)]), spec.remote_rank, local, remote)
        for spec, local, remote in targets
    )
    found, remote = Cut(routes, _region_blocks(worker, engine_id)), worker.transfer_topo.get_engine_info(engine_id)
    if isinstance(remote, StridedEngine):
        try:
            found = cut(worker, engine_id, remote, layout, routes)
        except MismatchError as error:
            if size_difference(worker, remote) is not None:
                raise
            return Link(engine_id, (), (), refusal=str(error))
    return Link(
        engine_id,
        found.routes,
        found.region_blocks,
        share=1.0 / head_parts(worker, engine_id),
        replicas=replicas(worker, engine_id),
        pieces=found.pieces,
    )


def replicas(worker: NixlPushConnectorWorker, engine_id: str) -> tuple[Replica, ...]:
    """This rank's part of the blocks of each transferred KV cache group, among the ranks that write to the same rank of
    a connected decode engine. vLLM has checked by the sizes of the blocks that the heads are split as it counts them.
    """
    topology = worker.transfer_topo
    assert topology is not None
    remote = topology.get_engine_info(engine_id)
    writers = topology.tp_ratio(remote.remote_tp_size)
    same_heads = max(1, topology.tp_size // topology.total_num_kv_heads)
    if writers <= 1 or topology.dcp_size > 1 or remote.remote_dcp_size > 1:
        return ()
    counts = {"same": writers, "heads": min(writers, same_heads), None: 1}
    found = []
    for group in worker.kv_cache_config.transfer_groups:
        count = min(counts[kind.ranks] for kind in kinds_of(group.kv_cache_spec))
        found.append(Replica(topology.tp_rank % count, count))
    return tuple(found)


def own_blocks(worker: NixlPushConnectorWorker, engine_id: str, whole: ReadSpec) -> ReadSpec:
    """The blocks of a whole push that this rank sends. At least one: vLLM attaches the completion to the WRITE."""
    parts = replicas(worker, engine_id)
    ids = list(zip(whole.local_block_ids, whole.remote_block_ids, strict=True))
    if all(part.count == 1 for part in parts) or refusal(worker, engine_id) is not None or whole.block_ids_by_region:
        return whole
    pages = worker._physical_blocks_per_logical_kv_block
    # Of the prompt's blocks, the decode engine has registered the last ones.
    pairs = [list(zip(local[-len(remote) :], remote, strict=True)) if len(remote) else [] for local, remote in ids]
    own = [
        [pair for index, pair in enumerate(group) if part.owns(index // pages)]
        for part, group in zip(parts, pairs, strict=True)
    ]
    has_layers = [bool(group.layer_names) for group in worker.kv_cache_config.transfer_groups]  # on a pipeline's stage
    if not any(itertools.compress(own, has_layers)):
        own = [group[-1:] for group in pairs]
    return replace(
        whole,
        local_block_ids=tuple([local for local, _ in group] for group in own),
        remote_block_ids=tuple([remote for _, remote in group] for group in own),
    )


def mismatch(worker: NixlPushConnectorWorker, engine_id: str, layout: CacheLayout | None = None) -> str | None:
    """The reason why no push between this engine and a connected one can be right; None if one can.

    vLLM has no check of tensor parallel sizes of models with Mamba. Its code for other block sizes is for pulls: it
    ends a decode engine to which a push has brought a whole request.
    """
    topology = worker.transfer_topo
    assert topology is not None
    remote = topology.get_engine_info(engine_id)
    if (difference := size_difference(worker, remote)) is not None:
        if has_states(worker.kv_cache_config):
            return f"{difference}, and a model with Mamba layers needs equal ones"
        if not isinstance(remote, StridedEngine) or not remote.is_layerpush:
            return f"{difference}, and vLLM's push connector needs equal ones"
    if isinstance(remote, StridedEngine) and (layer := moved_layer(worker, remote, layout)) is not None:
        return f"its rows have {layer} at another place than ours"
    return None


def refusal(worker: NixlPushConnectorWorker, engine_id: str) -> str | None:
    """The reason why a decode engine's blocks cannot be written layer by layer; None if they can."""
    local, theirs = worker.dst_region_num_blocks[worker.engine_id], worker.dst_region_num_blocks[engine_id]
    if len(local) != len(theirs):
        return f"it registered {len(theirs)} regions, we {len(local)}"
    return None


def _region_blocks(worker: NixlPushConnectorWorker, engine_id: str) -> tuple[int, ...]:
    """Its regions' sizes in descriptor order: kernel blocks of attention, then blocks of states."""
    assert worker.transfer_topo is not None
    remote = worker.transfer_topo.get_engine_info(engine_id)
    states = worker.dst_num_blocks[engine_id] // remote.remote_physical_blocks_per_logical
    parts = len(worker._ssm_region_indices) * len(state_parts(worker))
    return (*worker.dst_region_num_blocks[engine_id], *parts * [states])


def has_equal_blocks(worker: NixlPushConnectorWorker, engine_id: str) -> bool:
    """Whether a block of ours is a whole block of the decode engine's, not one rank's heads of it."""
    assert worker.transfer_topo is not None
    remote = worker.transfer_topo.get_engine_info(engine_id)
    return bool(worker.use_mla or worker.transfer_topo.tp_ratio(remote.remote_tp_size) == 1)


def agent_name(name: str | bytes) -> str:
    """An agent's name as a string. NIXL names an added agent in bytes, and the sender of a notification in a string."""
    return name.decode() if isinstance(name, bytes) else name


def _sample_request(worker: NixlPushConnectorWorker, engine_id: str) -> ReqMeta:
    """A made-up request with one block per group."""
    blocks = tuple([0] for _ in worker.kv_cache_config.transfer_groups)
    physical = worker._logical_to_kernel_block_ids(blocks, worker._physical_blocks_per_logical_kv_block)
    remote = RemoteMeta(block_ids=blocks, host="", port=0, engine_id=engine_id, request_id="")
    return ReqMeta(local_block_ids=blocks, local_physical_block_ids=physical, tp_size=worker.world_size, remote=remote)
