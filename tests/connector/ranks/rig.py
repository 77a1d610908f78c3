"""Engines of many ranks in one process, without a model: ``run`` pushes prompts from P to D and compares all of D's KV.

Each engine has vLLM's scheduler, one connector per rank, vLLM's plan of the KV cache, and NIXL over loopback. Only the
process groups are stubs: ``as_rank``. "Computing" a token writes bytes that name its layer, head and position.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from bench.servers.model import ModelShape
from layerpush.compat import pieces
from layerpush.core.prefill_identity import PrefillIdentity
from layerpush.telemetry.metrics.catalog import VERIFIED_PARTS
from layerpush.telemetry.metrics.recorder import Recorder
from tests.connector.conftest import PORTS
from tests.connector.engine import block_hasher, config_of
from tests.connector.ranks.topology import CHUNK, DRAFT_TOKENS, LAYERS, Kind, Side, Topology
from tests.connector.runners import V1Runner
from tests.e2e.models import CHANGES
from tests.support.totals import Totals
from tests.support.waiting import until

BLOCKS, MAX_TOKENS = 48, 512
HEAD_SIZE, LATENT, INDEX, WINDOW = 32, 48, 20, 80
LAYERPUSH = {"granularity": "layer", "packing": "off", "unknown_request_timeout_s": 120, "verify": 1.0}
POISON = 0xA5
"""The bytes of a KV cache that nobody has written."""
ATTENTION_HEADS = 8
DRAFTED = f"model.layers.{LAYERS}.self_attn.attn"
"""A drafter's layer. As in vLLM its number follows those of the model's layers."""
DEADLINE_S = 60.0

logger = logging.getLogger("vllm")


@dataclass
class Result:
    """``mode`` is "by layer", "whole" or "refused"; ``reason`` has the log lines with the cause of the last two.

    ``compared`` counts the bytes of D that had to change, ``needed`` those of the blocks around them, and ``sent`` the
    bytes that each rank of P wrote. ``repeated`` of them are of states, and another rank of P sends them, too.
    ``differing`` names the ranks of D with wrong bytes, and ``verified`` counts the parts that they compared with P's.
    ``kept`` are the tokens that D had in its prefix cache.
    """

    mode: str
    reason: str = ""
    compared: int = 0
    needed: int = 0
    repeated: int = 0
    kept: int = 0
    sent: list[int] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    verified: int = 0


def model(folder: Path, kind: Kind, heads: int) -> Path:
    """A folder with the ``config.json`` of a model with this attention."""
    path = folder / f"{kind}-{heads}"
    if not path.exists():
        shape = ModelShape(
            layers=LAYERS, hidden=64, heads=ATTENTION_HEADS, kv_heads=heads, head_dim=HEAD_SIZE, intermediate=64,
            vocabulary=1024, max_positions=2 * MAX_TOKENS,
        )  # fmt: skip
        changes: dict[str, Any] = {}
        if kind in ("window", "mixed"):
            changes = CHANGES["sliding"] | {"sliding_window": WINDOW}
        elif kind in ("mla", "indexer", "mla-gdn"):
            changes = CHANGES["mla"] | {"num_attention_heads": ATTENTION_HEADS, "num_key_value_heads": ATTENTION_HEADS}
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(shape.config() | changes))
    return path


def draft_model(target: Path) -> Path:
    """A folder with the ``config.json`` of a drafter for ``target``: EAGLE with one layer."""
    path = target.with_name(f"{target.name}-drafter")
    if not path.exists():
        path.mkdir()
        shape = json.loads((target / "config.json").read_text())
        changes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
        (path / "config.json").write_text(json.dumps(shape | changes))
    return path


def layer_specs(topology: Topology, side: Side) -> dict[str, KVCacheSpec]:
    """What each layer's cache holds on one rank, by the layer's name, a drafter's last."""
    size, dtype = side.block_size, getattr(torch, side.dtype)
    heads = len(topology.heads_of(side, 0))
    full = FullAttentionSpec(block_size=size, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=dtype)
    window = SlidingWindowSpec(
        block_size=size, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=dtype, sliding_window=WINDOW
    )
    latent, index = (
        MLAAttentionSpec(block_size=size, num_kv_heads=1, head_size=width, dtype=dtype) for width in (LATENT, INDEX)
    )
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        match topology.kind:
            case "full":
                specs[f"{attention}.attn"] = full
            case "window":
                specs[f"{attention}.attn"] = window
            case "mixed":
                specs[f"{attention}.attn"] = window if layer % 2 else full
            case "mla":
                specs[f"{attention}.attn"] = latent
            case "states" | "gdn" | "mla-gdn" if layer % 2:
                specs[f"{attention}.attn"] = latent if topology.has_latents else full
            case (
                "states" | "gdn" | "mla-gdn" | "only-states"
            ):  # before attention, as in most models: vLLM registers its memory first
                page = (latent if topology.has_latents else full).page_size_bytes
                specs[f"model.layers.{layer}.mixer"] = state(topology, side, page)
            case "indexer":
                specs[f"{attention}.attn"] = latent
                specs[f"{attention}.indexer.k_cache"] = index
    if topology.drafter is not None:
        specs[DRAFTED] = latent if topology.drafter == "latents" else full
    return specs


def state(topology: Topology, side: Side, page_bytes: int) -> MambaSpec:
    """One rank's share of a layer's state. Its blocks are as large as those of attention."""
    if "gdn" in topology.kind:
        backend = MambaAttentionBackendEnum.GDN_ATTN
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            side.tp, num_k_heads=8, num_v_heads=8, head_k_dim=16, head_v_dim=8, conv_kernel_size=4,
            num_spec=topology.drafts,
        )  # fmt: skip
    else:
        backend = MambaAttentionBackendEnum.MAMBA2
        shapes = MambaStateShapeCalculator.mamba2_state_shape(
            side.tp, intermediate_size=64, n_groups=topology.groups, num_heads=8, head_dim=8, state_size=16,
            conv_kernel=4, num_spec=topology.drafts,
        )  # fmt: skip
    dtype = getattr(torch, side.dtype)
    return MambaSpec(
        block_size=side.block_size if topology.caches else MAX_TOKENS, shapes=shapes, dtypes=(dtype, dtype),
        page_size_padded=page_bytes, mamba_type=backend, mamba_cache_mode="align" if topology.caches else "none",
        num_speculative_blocks=topology.drafts,
    )  # fmt: skip


def state_parts(topology: Topology, side: Side, spec: MambaSpec) -> list[tuple[int, bool]]:
    """The bytes of each part of a rank's share of a state, and whether all ranks have the same ones.

    Mamba-2: inputs, B, C, the state; gated delta net: queries, keys, values, the state. The convolution has three
    columns of each of the first three, and one more for each draft.
    """
    dtype = getattr(torch, side.dtype)
    is_gdn = "gdn" in topology.kind
    width = 8 * 16 if is_gdn else 16 * max(topology.groups, side.tp)
    same = not is_gdn and topology.groups % side.tp > 0
    inputs = spec.shapes[0][0] - 2 * width // side.tp
    others = [(width // side.tp, same)] * 2
    convolved = [*others, (inputs, False)] if is_gdn else [(inputs, False), *others]
    columns = 3 + topology.drafts
    parts = [(columns * channels, is_same) for channels, is_same in convolved] + [(math.prod(spec.shapes[1]), False)]
    return [(count * dtype.itemsize, is_same) for count, is_same in parts]


@contextmanager
def as_rank(config: VllmConfig, tp_rank: int, pp_rank: int, pcp_rank: int) -> Iterator[VllmConfig]:
    """vLLM's process groups as this rank sees them, and its configuration. The only stub of parallelism."""
    parallel = copy.copy(config.parallel_config)
    pcp_size = parallel.prefill_context_parallel_size
    parallel.rank = (pp_rank * pcp_size + pcp_rank) * parallel.tensor_parallel_size + tp_rank
    mine = copy.copy(config)
    mine.parallel_config = parallel
    tp = SimpleNamespace(rank_in_group=tp_rank, world_size=parallel.tensor_parallel_size)
    pp = SimpleNamespace(rank_in_group=pp_rank, world_size=parallel.pipeline_parallel_size)
    pcp = SimpleNamespace(rank_in_group=pcp_rank, world_size=pcp_size)
    with patch.multiple(parallel_state, _TP=tp, _PP=pp, _PCP=pcp):
        yield mine


class Agent(base_worker.NixlWrapper):  # NIXL has no types
    """A NIXL agent that counts the bytes of its WRITEs as they end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent, self._open = 0, set[int]()
        super().__init__(*args, **kwargs)

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> Any:
        handle = super().make_prepped_xfer(*args, **kwargs)
        self._open.add(id(handle))
        return handle

    def transfer(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        return self._counted(handle, super().transfer(handle, *args, **kwargs))

    def check_xfer_state(self, handle: Any) -> Any:
        return self._counted(handle, super().check_xfer_state(handle))

    def _counted(self, handle: Any, state: str) -> str:
        if state == "DONE" and id(handle) in self._open:
            self._open.remove(id(handle))
            self.sent += self.get_xfer_telemetry(handle).totalBytes
        return state


class Rank:
    """One rank: its connector and its KV cache. ``memory`` are all bytes of the cache."""

    def __init__(
        self,
        topology: Topology,
        side: Side,
        config: VllmConfig,
        caches: KVCacheConfig,
        tp_rank: int,
        pp_rank: int,
        pcp_rank: int,
    ) -> None:
        self.name, self.coordinates, self.sends = f"rank {tp_rank}", (pp_rank, tp_rank), pcp_rank == 0
        self._heads, self._groups = topology.heads_of(side, tp_rank), caches.kv_cache_groups
        self._drafts = topology.drafts
        with as_rank(config, tp_rank, pp_rank, pcp_rank) as mine, patch.object(base_worker, "NixlWrapper", Agent):
            self.connector: Any = KVConnectorFactory.create_connector(mine, KVConnectorRole.WORKER, caches)
            worker = self.connector.connector_worker
            self.agent: Agent = getattr(worker.nixl_wrapper, "unlocked", worker.nixl_wrapper)
            specs = worker._layer_specs.items()
            self._states = {
                name: state_parts(topology, side, spec) for name, spec in specs if isinstance(spec, MambaSpec)
            }
            self._latents = {name for name, spec in specs if isinstance(spec, MLAAttentionSpec)}
            sizes = [
                group.kv_cache_spec.block_size if self._states.keys() >= set(group.layer_names) else worker.block_size
                for group in self._groups
            ]
            tensors = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout[side.layout], sizes)
            first = next(iter(tensors.values()))
            self.memory = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
            self.memory.fill_(POISON)
            parts = side.block_size // worker.block_size
            self._pages = {
                name: in_memory(tensor.view(torch.uint8), self.memory, 1 if name in self._states else parts)
                for name, tensor in tensors.items()
            }
            late = {DRAFTED, *self._states} if topology.drafts else {DRAFTED}  # vLLM may copy states last of all
            self.runner = V1Runner(self.connector, mine, tensors, drafted=tensors.keys() & late)
        self.totals = None if side.stock else Totals(worker.pushes._services.meter)
        self._checked = Recorder()
        if not side.stock and worker.loads._checks is not None:
            worker.loads._checks._recorder = self._checked

    def write(self, name: str, table: list[int], tokens: range, memory: torch.Tensor | None = None) -> None:
        """Write a layer's KV of these tokens of a prompt with these blocks into ``memory``, or into the cache."""
        page = self.page(name, memory)
        if name in self._states:  # that of the last token
            page[table[-1 - self._drafts], 0, 0, 0] = torch.cat([*self._state(name, tokens.stop - 1)])
            return
        rows = page.shape[3]
        where = torch.arange(tokens.start, tokens.stop)
        block = torch.tensor(table)[where // (page.shape[1] * rows)]
        kept = block != 0  # not the null block
        where, block = where[kept], block[kept]
        heads = range(1) if name in self._latents else self._heads
        values = content(name, heads, page.shape[4])[:, where]
        page[block, where // rows % page.shape[1], :, where % rows] = values.transpose(0, 1)

    def _state(self, name: str, token: int) -> Iterator[torch.Tensor]:
        """The bytes of each part of this rank's share of a layer's state after a token."""
        for part, (size, is_same) in enumerate(self._states[name]):
            start = 0 if is_same else self.coordinates[1] * size
            yield content(name, range(part, part + 1), start + size)[0, token, start:]

    def page(self, name: str, memory: torch.Tensor | None = None) -> torch.Tensor:
        """A layer's cache, or the same bytes of ``memory``: ``uint8 [blocks, kernel blocks, heads, tokens, bytes]``."""
        page = self._pages[name]
        return page if memory is None else memory.as_strided(page.shape, page.stride(), page.storage_offset())

    @property
    def same_bytes(self) -> int:
        """The bytes of its states that other ranks have, too."""
        return sum(size for parts in self._states.values() for size, is_same in parts if is_same)

    @property
    def verified(self) -> int:
        """The parts of its KV that it has compared with P's. They were equal, or a load has failed."""
        return sum(self._checked.take_delta().counters.get(VERIFIED_PARTS.key, {}).values())

    @property
    def layers(self) -> list[str]:
        return list(self._pages)

    def group_of(self, name: str) -> int:
        """The index of a layer's KV cache group."""
        return next(index for index, group in enumerate(self._groups) if name in group.layer_names)


@cache
def content(name: str, heads: range, width: int) -> torch.Tensor:
    """The KV of a prompt in one layer, ``uint8 [heads, tokens, width]``: other bytes for each layer, head and token."""
    layer = int(name.split(".")[2]) * 2 + ("indexer" in name)
    head, token, byte = torch.meshgrid(
        torch.tensor(heads), torch.arange(MAX_TOKENS), torch.arange(width), indexing="ij"
    )
    key = ((layer * 61 + head) * 1021 + token) * 256 + byte
    return ((key * 2654435761) >> 13 & 0xFF).to(torch.uint8)


def in_memory(tensor: torch.Tensor, memory: torch.Tensor, parts: int) -> torch.Tensor:
    """A layer's cache as ``Rank.page`` returns it. ``parts`` kernel blocks are one block."""
    view = tensor.view(torch.uint8)
    shape, stride = view.shape, view.stride()
    start = tensor.data_ptr() - memory.data_ptr()
    return memory.as_strided((shape[0] // parts, parts, *shape[1:]), (stride[0] * parts, *stride), start)


class Engine:
    """A prefill or decode engine: a scheduler, and ranks that run each of its steps one after the other."""

    def __init__(self, topology: Topology, side: Side, role: str, folder: Path, index: int = 0) -> None:
        self.port = PORTS.next_free()
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.port)
        self.topology, self.side, self.engine_id = topology, side, f"{role}-{self.port}"
        self.is_p = role == "kv_producer"
        target, drafter = model(folder, topology.kind, topology.heads), {}
        if topology.drafter is not None:
            drafter = {"method": "eagle", "model": str(draft_model(target)), "num_speculative_tokens": DRAFT_TOKENS}
        elif topology.drafts:
            drafter = {"method": "ngram", "num_speculative_tokens": topology.drafts, "prompt_lookup_max": 2}
        self.config = config = config_of(
            target,
            role,
            self.engine_id,
            {"num_threads": 0} if side.stock else LAYERPUSH | {"layerwise": side.layerwise},
            "NixlPushConnector" if side.stock else "LayerwisePushConnector",
            tensor_parallel_size=side.tp,
            pipeline_parallel_size=side.pp,
            dtype=side.dtype,
            max_model_len=MAX_TOKENS,
            num_gpu_blocks_override=BLOCKS,
            disable_hybrid_kv_cache_manager=False,
            async_scheduling=False,
            speculative_config=drafter or None,
            attention_backend="CPU_MLA" if topology.has_latents else None,  # not AMX_MLA, whose blocks are larger
        )
        config.cache_config.block_size = side.block_size  # vLLM's CPU platform would change MLA's
        config.attention_config.backend = AttentionBackendEnum.CPU_MLA  # AMX_MLA takes multiples of 32 only
        config.cache_config.enable_prefix_caching = topology.caches
        config.cache_config.mamba_cache_mode = "align" if topology.caches else "none"
        config.cache_config.kv_cache_layout = side.layout
        config.scheduler_config.max_num_batched_tokens = CHUNK if self.is_p else MAX_TOKENS
        config.scheduler_config.enable_chunked_prefill = True
        specs = layer_specs(topology, side)
        config.parallel_config.prefill_context_parallel_size = side.pcp  # vLLM's CPU platform has none
        config.parallel_config.world_size *= side.pcp
        coordinates = list(product(range(side.pp), range(side.pcp), range(side.tp)))
        share = (len(specs) - (DRAFTED in specs)) // side.pp
        stages = [dict(list(specs.items())[pp * share : (pp + 1) * share]) for pp in range(side.pp)]
        stages[-1] |= {name: spec for name, spec in specs.items() if name == DRAFTED}
        caches = plan(config, [stages[pp] for pp, *_ in coordinates])
        for one in caches:
            one.kv_cache_layout = side.layout
        config.cache_config.num_gpu_blocks = caches[0].num_blocks
        merged = core.generate_scheduler_kv_cache_config(caches)
        sizes = core.resolve_kv_cache_block_sizes(merged, config)
        self._hashed_tokens = sizes[1]
        self.scheduler = Scheduler(config, merged, StructuredOutputManager(config), *sizes)
        shuffle(self.scheduler.kv_cache_manager.block_pool, f"{role}-{index}")
        self.ranks = [
            Rank(topology, side, config, one, tp, pp, pcp)
            for one, (pp, pcp, tp) in zip(caches, coordinates, strict=True)
        ]
        contacts = {rank.coordinates: rank.connector.get_handshake_metadata() for rank in self.ranks if rank.sends}
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(contacts)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, len(self.ranks))
        self.requests: dict[str, Request] = {}
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.finished: set[str] = set()

    def add(self, request_id: str, params: dict[str, Any] | None, tokens: int) -> None:
        self.requests[request_id] = self.request(request_id, params, tokens)
        self.scheduler.add_request(self.requests[request_id])

    def request(self, request_id: str, params: dict[str, Any] | None, tokens: int) -> Request:
        answer = 1 if self.is_p else 2
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, None)
        hasher = block_hasher(self._hashed_tokens) if self.topology.caches else None
        return Request(request_id, list(range(3, 3 + tokens)), sampling, None, block_hasher=hasher)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def cached(self, tokens: int) -> int:
        """The tokens of a prompt that are in the prefix cache."""
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(self.request("question", None, tokens))[1])

    def landed(self, request_id: str) -> list[int]:
        """The first tokens of a load's prompt that each rank knows to have landed."""
        workers = [rank.connector.connector_worker for rank in self.ranks]
        return [worker.loads._open[request_id].session.landed_tokens for worker in workers]

    def blocks(self, request_id: str) -> list[list[int]]:
        """The request's blocks in each KV cache group."""
        return [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(request_id)]

    def params_from(self, p: Engine, request_id: str) -> dict[str, Any]:
        """The ``kv_transfer_params`` of D's request, as a router gives them."""
        return PrefillIdentity(p.engine_id, "127.0.0.1", p.port, p.side.tp, p.side.pp).to_decode(request_id)

    @property
    def registrations(self) -> int:
        """How many registrations each rank of P has that wait for their request."""
        workers = [rank.connector.connector_worker for rank in self.ranks if rank.sends]
        if self.side.stock:
            return min(len(worker._pending_d_registrations) for worker in workers)
        return min(int(worker.claims.pending) for worker in workers)

    def step(self) -> None:
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        results = []
        for rank in self.ranks:
            mine = copy.copy(output)  # each worker unpickles its own
            mine.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
            forward = partial(self._forward, rank, output) if ids else None
            results.append(self._result(output, ids, rank.runner.run(mine, forward)))
        merged = self.aggregator.aggregate(results)
        assert merged is not None
        news = merged.kv_connector_output or KVConnectorOutput()
        self.sent |= news.finished_sending or set()
        self.received |= (news.finished_recving or set()) - news.failed_recving
        self.failed |= news.failed_recving
        for outputs in self.scheduler.update_from_output(output, merged).values():
            self.finished |= {one.request_id for one in outputs.outputs if one.finished}

    def _result(self, output: SchedulerOutput, ids: list[str], news: KVConnectorOutput) -> ModelRunnerOutput:
        ready = [one for one in ids if self._computed(one) >= self.requests[one].num_prompt_tokens]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: index for index, one in enumerate(ids)},
            sampled_token_ids=[[7] if one in ready else [] for one in ids],
            kv_connector_output=news,
        )

    def _computed(self, request_id: str) -> int:
        return int(self.requests[request_id].num_computed_tokens)  # schedule() has counted this step already

    def _forward(self, rank: Rank, output: SchedulerOutput, layers: Any) -> None:
        for name in layers:
            for request_id, count in output.num_scheduled_tokens.items():
                if request_id in self.received:
                    continue  # D computes the last token again; only what P has written is to be compared
                end = self._computed(request_id)
                tokens = range(end - count, min(end, self.requests[request_id].num_prompt_tokens))
                if tokens:
                    table = self.blocks(request_id)[rank.group_of(name)]
                    rank.write(name, table, tokens)
            rank.runner.attended(name)

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()


def plan(config: VllmConfig, specs: list[dict[str, KVCacheSpec]]) -> list[KVCacheConfig]:
    """vLLM's plan of each rank's KV cache."""
    configs: Any = core.get_kv_cache_configs
    memory = [1 << 40] * len(specs)
    if (group := getattr(core, "get_global_kv_cache_groups", None)) is not None:  # vLLM 0.33
        return list(configs(config, specs, memory, group(config, specs)))
    return list(configs(config, specs, memory))


def shuffle(pool: Any, seed: str) -> None:
    """Put the free blocks into another order, so that equal block ids on P and D mean nothing."""
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    random.Random(seed).shuffle(blocks)
    pool.free_blocks(blocks)


class Lines(logging.Handler):
    """Keeps the warnings and errors of vLLM's loggers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self.lines.append(record.getMessage() + error)


@dataclass
class Prompt:
    """A prompt on its way from ``p`` to ``d``, with its blocks on ``d`` in each KV cache group."""

    name: str
    p: Engine
    d: Engine
    tables: list[list[int]]

    @property
    def failed(self) -> bool:
        """D has given it up, or P has: a stock D does not learn of that."""
        outcomes = [rank.totals.outcomes for rank in self.p.ranks if self.d.side.stock and rank.totals is not None]
        return self.name in self.d.failed or any(outcome["failed"] for outcome in outcomes)

    @property
    def over(self) -> bool:
        return self.failed or (self.name in self.d.received and self.name in self.p.sent)


def run(topology: Topology, folder: Path) -> Result:
    """Push each prompt and compare all of D's memory. ``folder`` is for the models' configurations."""
    lines, cores = Lines(), os.sched_getaffinity(0)
    engines: list[Engine] = []
    try:
        with patch.dict(pieces.CONTENT, {"cpu_attn": pieces._tokens}):  # as ``Rank.write``
            return _run(topology, folder, engines, lines)
    finally:
        logger.removeHandler(lines)
        while engines:
            engines.pop().shutdown()
        os.sched_setaffinity(0, cores)  # vLLM's worker takes one of them
        gc.collect()  # NIXL's agents end with their last reference, and their threads with them


def _run(topology: Topology, folder: Path, engines: list[Engine], lines: Lines) -> Result:
    def build(side: Side, role: str) -> list[Engine]:
        engines.extend(Engine(topology, side, role, folder, index) for index in range(side.dp))
        return engines[-side.dp :]

    def step_until(done: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            for engine in engines:
                engine.step()
            return done()

        until(look, what, DEADLINE_S, pause_s=0.002)

    try:
        ps, ds = build(topology.p, "kv_producer"), build(topology.d, "kv_consumer")
    except (AssertionError, NotImplementedError, ValueError) as error:
        if not str(error):
            raise  # an assertion of ours
        return Result("refused", repr(error))
    logger.addHandler(lines)  # vLLM's first engine in a process has removed others
    if topology.cached:
        for d in ds:
            d.add("warm", None, topology.cached)
        step_until(lambda: all("warm" in d.finished for d in ds), "a prompt in the prefix cache")
    if topology.steps:
        push_a_part(topology, ps[0], ds[0], step_until)
    for rank in [rank for engine in engines for rank in engine.ranks]:
        rank.agent.sent = 0
    kept = ds[0].cached(topology.tokens) if topology.steps else 0
    before = {d: [rank.memory.clone() for rank in d.ranks] for d in ds}
    prompts = []
    for (i, p), (j, d) in product(enumerate(ps), enumerate(ds)):
        d.add(f"r-{i}-{j}", d.params_from(p, f"r-{i}-{j}"), topology.tokens)
        d.step()
        prompts.append(Prompt(f"r-{i}-{j}", p, d, d.blocks(f"r-{i}-{j}")))
    step_until(
        lambda: all(p.registrations >= sum(one.p is p and not one.failed for one in prompts) for p in ps),
        "registrations on all ranks of P",
    )
    for one in prompts:
        one.p.add(one.name, {"do_remote_decode": True, "do_remote_prefill": False}, topology.tokens)
    step_until(lambda: all(one.over for one in prompts), "the end of all pushes")
    totals = [rank.totals for p in ps for rank in p.ranks if rank.totals is not None]
    fallbacks = sorted({reason for one in totals for reason in one.fallbacks})
    by_layer = totals and topology.p.layerwise and not fallbacks
    result = Result("by layer" if by_layer else "whole", "; ".join(fallbacks))
    if any(one.failed for one in prompts):
        result = Result("refused", "\n".join(lines.lines))
    result.kept = kept
    result.sent = [rank.agent.sent for p in ps for rank in p.ranks]
    result.verified = sum(rank.verified for d in ds for rank in d.ranks)
    result.repeated = max(0, topology.p.tp - topology.d.tp) * ps[0].ranks[0].same_bytes
    p, d = (engine.ranks[0].connector.connector_worker for engine in (ps[0], ds[0]))
    cuts = topology.p.block_size != topology.d.block_size and not topology.has_states
    piece = math.gcd(p.block_size, d.block_size) if cuts else None
    for d, memories in before.items():
        for rank, memory in zip(d.ranks, memories, strict=True):
            judge(rank, memory, [one for one in prompts if one.d is d], topology.pushed_tokens, piece, result)
    return result


def push_a_part(
    topology: Topology, p: Engine, d: Engine, step_until: Callable[[Callable[[], bool], str], None]
) -> None:
    """P aborts a push after some steps, when all of their KV has landed."""
    filled = topology.steps * CHUNK // topology.p.block_size * topology.p.block_size
    if topology.has_windows:
        filled = 0
    d.add("part", d.params_from(p, "part"), topology.tokens)
    step_until(lambda: p.registrations > 0, "a registration on all ranks of P")
    p.add("part", {"do_remote_decode": True, "do_remote_prefill": False}, topology.tokens)
    for _ in range(topology.steps):
        p.step()
    until(lambda: set(d.landed("part")) == {filled}, "a prefix on all ranks of D", DEADLINE_S)
    p.abort("part")
    step_until(lambda: "part" in d.failed, "the end of a part of a push")


def judge(
    rank: Rank, before: torch.Tensor, prompts: list[Prompt], tokens: int, piece: int | None, result: Result
) -> None:
    """Compare all of a D rank's memory. Of a prompt's last block, the rows behind the prompt may have any bytes, and
    so may all of its blocks if it was refused. ``piece``: P sends pieces of so many tokens, not whole blocks.
    """
    expected, free = before.clone(), torch.zeros(len(before), dtype=torch.bool)
    if result.mode != "by layer":  # vLLM writes the blocks of a group in all regions, also of other groups
        own = [block for prompt in prompts for table in prompt.tables for block in table if block]
        for name in rank.layers:
            rank.page(name, free)[own] = True
    for name, prompt in product(rank.layers, prompts):
        blocks = prompt.tables[rank.group_of(name)]
        page = rank.page(name, free)
        size = page.shape[1] * page.shape[3]
        page[[block for block in blocks if block]] = prompt.failed
        if prompt.failed:
            continue
        rank.write(name, blocks, range(tokens), expected)
        rows = page.shape[3]
        for position in range(tokens, -(-tokens // size) * size):
            page[blocks[position // size], position // rows % page.shape[1], :, position % rows] = True
    changed = expected != before
    for name, prompt in product(rank.layers, prompts):
        page = rank.page(name, changed)[[block for block in prompt.tables[rank.group_of(name)] if block]]
        if piece:
            page = page.transpose(2, 3).reshape(-1, piece, *page.shape[2::2])
        result.needed += int(page.flatten(1).any(1).sum()) * page[0].numel()
    result.compared += int(torch.count_nonzero(changed))
    if wrong := int(torch.count_nonzero(~free & (rank.memory != expected))):
        result.differing.append(f"{rank.name}: {wrong} bytes")
