"""States of Mamba layers between engines with unequal tensor parallel sizes, where vLLM's descriptors are wrong.

vLLM takes every part of a state for split between the ranks. But with one group of Mamba-2, each rank has B and C of
the convolution whole. And where ranks of the decode engine have equal KV heads, vLLM pushes KV to one of them only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from layerpush.compat.kinds import has_states

Descriptors = NDArray[np.uint64]
"""Of shape ``(n, 3)``, one for each block: address, bytes, device. vLLM 0.33 has one for all blocks of a region, of
shape ``(n, 5)``: also their number and their distance.
"""
GROUPS = slice(1, 3)
"""B and C among the four parts of a state of Mamba-2. The inputs are before them, then comes the other state."""


def has_whole_groups(worker: NixlPushConnectorWorker, metadata: NixlAgentMetadata, tp_size: int) -> bool:
    """Whether B and C are not split between the ranks of this engine, or of a connected one of ``tp_size`` ranks.

    Raises ``ValueError`` if no push of states from one to the other can be right. Handshake executor.
    """
    topology = worker.transfer_topo
    assert topology is not None
    ranks = topology.tp_size
    if tp_size == ranks or not has_states(worker.kv_cache_config):
        return False
    assert worker._conv_decomp is not None
    (convolved, state), (its_convolved, its_state) = worker._mamba_ssm_size, metadata.ssm_sizes
    inputs, *groups = worker._conv_decomp.proj_bytes
    is_whole = bool(convolved * ranks != its_convolved * tp_size)
    if state * ranks != its_state * tp_size or (is_whole and (its_convolved - sum(groups)) * tp_size != inputs * ranks):
        raise ValueError(
            f"each of its {tp_size} tensor parallel ranks has {metadata.ssm_sizes} bytes of a state, and each of our"
            f" {ranks} has {worker._mamba_ssm_size}"
        )
    return is_whole


def check_stock_p(worker: NixlPushConnectorWorker, tp_size: int, *, is_whole: bool) -> None:
    """Raises ``ValueError`` if vLLM's own push from ``tp_size`` ranks cannot be right, so this decode engine would wait
    for it in vain, or for wrong bytes. ``is_whole``: see ``has_whole_groups``.
    """
    topology, transfer = worker.transfer_topo, worker.vllm_config.kv_transfer_config
    assert topology is not None
    if transfer.is_kv_consumer and (is_whole or _have_equal_heads(worker, topology.tp_size, tp_size)):
        raise ValueError(
            "vLLM's push connector cannot push KV heads, or parts of a state, that ranks have in common: with"
            f" {tp_size} ranks and {topology.tp_size} here, the prefill engine must run layerpush"
        )


def _have_equal_heads(worker: NixlPushConnectorWorker, ranks: int, fewer: int) -> bool:
    """Whether some of ``ranks`` decode ranks have equal KV heads, so that one of ``fewer`` prefill ranks must write
    each to several.
    """
    assert worker.transfer_topo is not None
    return not worker.use_mla and ranks > max(fewer, worker.transfer_topo.total_num_kv_heads)


@contextmanager
def equal_heads_allowed(worker: NixlPushConnectorWorker, tp_size: int) -> Iterator[None]:
    """vLLM connects to an engine of ``tp_size`` ranks, of which several may have one KV head of ours.

    Its check is for pulls and allows none. Without it vLLM checks that a block there has the bytes of the head.
    """
    topology = worker.transfer_topo
    assert topology is not None
    if not _have_equal_heads(worker, tp_size, topology.tp_size):
        yield
        return
    topology.is_kv_replicated = lambda *_: False
    try:
        yield
    finally:
        del topology.is_kv_replicated


def to_all_ranks(worker: NixlPushConnectorWorker, plan: Any, tp_size: int) -> Any:
    """vLLM's plan for an engine of ``tp_size`` ranks, with all of them. If some have equal heads, vLLM's plan has only
    one of them for each head.
    """
    topology = worker.transfer_topo
    assert topology is not None
    if not _have_equal_heads(worker, tp_size, topology.tp_size):
        return plan
    slot, slots = 0, dict[int, int]()
    for rank in topology.handshake_target_ranks(tp_size):
        slot = slots[rank] = plan.rank_to_attention_slot.get(rank, slot)
    return replace(plan, all_source_ranks=tuple(slots), rank_to_attention_slot=slots)


def push_kv_to_all(worker: NixlPushConnectorWorker, engine_id: str, tp_size: int) -> None:
    """Have each rank of a connected engine get KV, also those with equal heads."""
    plan = worker.tp_mappings[engine_id]
    whole = to_all_ranks(worker, plan, tp_size)
    if whole is not plan:
        ranks = tuple(whole.all_source_ranks for _ in plan.source_ranks_per_group)
        worker.tp_mappings[engine_id] = replace(whole, source_ranks_per_group=ranks)


def whole_groups_here(worker: NixlPushConnectorWorker, split: Any, whole: Descriptors, states: int) -> Descriptors:
    """vLLM's ``split`` descriptors of our cache, with B and C as in ``whole``. ``states`` blocks are before states."""
    rows = np.array(split, dtype=np.uint64)
    first = states if rows.shape[1] == 3 else len(rows) - len(worker._ssm_region_indices) * (GROUPS.stop + 1)
    _by_part(worker, rows[first:])[:, GROUPS] = _by_part(worker, whole[first:])[:, GROUPS]
    return rows


def whole_groups_there(
    worker: NixlPushConnectorWorker, rows: Descriptors, convolved: int, tp_ratio: int
) -> Descriptors:
    """vLLM's descriptors of another engine's states, with B and C whole at the end of the ``convolved`` bytes."""
    assert worker._conv_decomp is not None
    inputs, *groups = worker._conv_decomp.proj_bytes
    parts = _by_part(worker, rows)
    ends = parts[:, 0, :, 0] - worker.tp_rank % max(tp_ratio, 1) * inputs + convolved
    parts[:, 1, :, 0], parts[:, 2, :, 0] = ends - sum(groups), ends - groups[1]
    parts[:, GROUPS, :, 1] = groups[0]
    return rows


def _by_part(worker: NixlPushConnectorWorker, rows: Descriptors) -> Descriptors:
    """A view of descriptors of states by region, part and block."""
    assert len(rows)
    return rows.reshape(len(worker._ssm_region_indices), GROUPS.stop + 1, -1, rows.shape[1])
