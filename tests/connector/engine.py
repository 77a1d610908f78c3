"""A vLLM engine without a model: the real scheduler, the real connector in both roles, KV caches filled by hand.

A model runner of ``runners`` calls the connector. "Computing" a token of a layer writes a pattern of (layer, token,
position) into the cache, so that a test can check the KV on another engine byte by byte.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from layerpush.core.prefill_identity import TO_PREFILL, PrefillIdentity
from tests.connector.runners import Runner, V1Runner
from tests.support.totals import Totals

LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 4, 2, 32, 32, 40
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
TOKENS_PER_STEP = 64
STAGING_BYTES = 1 << 20
"""Each engine writes zeros into its staging memory. The default is 64 MiB."""


def config_of(
    model: Path,
    role: str,
    engine_id: str,
    extra: dict[str, Any] | None = None,
    connector: str = "LayerwisePushConnector",
    **options: Any,
) -> VllmConfig:
    extra = {"staging_bytes": STAGING_BYTES} | (extra or {})
    if connector == "LayerwisePushConnector":
        # Some pushes are wrong on purpose, and tests read each message. Few prompts fill a cache of 40 blocks.
        extra = {"verify": 0, "awaited_share": 1} | extra
    else:
        extra = {"num_threads": 0} | extra
    transfer = KVTransferConfig(
        kv_connector=connector, engine_id=engine_id, kv_role=role, kv_connector_extra_config=extra
    )
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": TOKENS_PER_STEP if role == "kv_producer" else 512,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return EngineArgs(model=str(model), kv_transfer_config=transfer, **(arguments | options)).create_engine_config()


def cache_config(layout: str = "LBHNC") -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    page = spec.page_size_bytes
    strides = (page * BLOCKS, page) if layout == "LBHNC" else (page, page * LAYERS)
    tensor = KVCacheTensor(
        size=LAYERS * page * BLOCKS, layers=NAMES, offset=0, layer_stride=strides[0], block_stride=strides[1]
    )
    return KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(NAMES, spec)], kv_cache_layout=layout)


def allocate(layout: str) -> dict[str, torch.Tensor]:
    """``[blocks, heads, tokens, 2 * head size]`` for every layer, K and V side by side, out of one allocation.

    The layout names the allocation's axes from the outermost: layers, blocks, heads, tokens, content.
    """
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": BLOCK_SIZE, "C": 2 * HEAD_SIZE}
    whole = torch.full([sizes[axis] for axis in layout], -1.0)
    whole = whole.permute([layout.index(axis) for axis in "LBHNC"])
    return dict(zip(NAMES, whole, strict=True))


class Engine:
    """``step`` is one iteration of the engine's loop. ``hooks`` may name the layers whose hook is called."""

    def __init__(
        self,
        config: VllmConfig,
        port: int,
        layout: str = "LBHNC",
        runner: Callable[[Any, VllmConfig, dict[str, torch.Tensor]], Runner] = V1Runner,
    ) -> None:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        self.config, self.port = config, port
        caches = cache_config(layout)
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.kv_cache_layout = layout
        scheduler = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = scheduler(config, caches, StructuredOutputManager(config), BLOCK_SIZE, log_stats=True)
        self.worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        self.caches = allocate(layout)
        self.runner = runner(self.worker, config, self.caches)
        self.totals = Totals(self.pushes._services.meter)
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        self.requests: dict[str, Request] = {}
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []
        """Requests with a failed load."""
        self.lost: set[int] = set()
        """Indices of blocks that another connector loses in the next step, in the tables of the step's requests."""
        self.finished: list[str] = []
        self.transfer_params: dict[str, dict[str, Any]] = {}
        self.stats: list[dict[str, Any]] = []
        """The connector's statistics for the front end, step by step."""

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def engine_id(self) -> str:
        assert self.config.kv_transfer_config is not None
        return str(self.config.kv_transfer_config.engine_id)

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self, request_id: str, tokens: int, params: dict[str, Any] | None, max_tokens: int = 1, first: int = 3
    ) -> Request:
        """``first`` is the prompt's first token; each further token is one more."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, None)
        hasher = block_hasher() if self.scheduler.cache_config.enable_prefix_caching else None
        request = Request(request_id, list(range(first, first + tokens)), sampling, None, block_hasher=hasher)
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def prefill(self, request_id: str, tokens: int, mode: str | None = None, first: int = 3) -> Request:
        chosen = {} if mode is None else {"layerpush_mode": mode}
        return self.add(request_id, tokens, {**TO_PREFILL, **chosen}, first=first)

    def decode_from(
        self,
        producer: Engine,
        request_id: str,
        tokens: int,
        prefill_id: str | None = None,
        ranks: int = 1,
        max_tokens: int = 2,
        first: int = 3,
    ) -> Request:
        """The router gives P's request id as ``prefill_id``, and the number of P's ranks as ``ranks``."""
        identity = PrefillIdentity(producer.engine_id, "127.0.0.1", producer.port, ranks)
        return self.add(request_id, tokens, identity.to_decode(prefill_id or request_id), max_tokens, first)

    def refuse(self, request_id: str, params: dict[str, Any]) -> None:
        """The front end has refused a request: vLLM hands the scheduler a placeholder, and aborts it."""
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, None)
        self.scheduler.add_request(Request(request_id, [0], sampling, None, abort_immediately=True))
        self.abort(request_id)

    def blocks(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def step(self, hooks: list[str] | None = None, between: Callable[[str], None] | None = None) -> SchedulerOutput:
        output = self.scheduler.schedule()
        ready = self.ready(output)
        forward = partial(self._forward, output, hooks, between) if output.total_num_scheduled_tokens else None
        self.processed(output, ready, self.runner.run(output, forward))
        return output

    def ready(self, output: SchedulerOutput) -> list[str]:
        """The requests that the step, which has just been scheduled, samples a token for."""
        return [
            one
            for one in output.num_scheduled_tokens
            if self.requests[one].num_computed_tokens >= self.requests[one].num_prompt_tokens
        ]

    def processed(self, output: SchedulerOutput, ready: list[str], result: KVConnectorOutput) -> None:
        """The step is over: the scheduler gets its results."""
        assert not result.invalid_block_ids
        result.invalid_block_ids = {
            self.blocks(one)[index] for one in output.num_scheduled_tokens for index in self.lost
        }
        self.lost = set()
        self.sent += sorted(result.finished_sending or ())
        self.received += sorted((result.finished_recving or set()) - result.failed_recving)
        self.failed += sorted(result.failed_recving)
        self._update(output, ready, result)

    def _forward(
        self,
        output: SchedulerOutput,
        hooks: list[str] | None,
        between: Callable[[str], None] | None,
        layers: Iterable[str],
    ) -> None:
        for name in layers:
            self._compute(name, output)
            if hooks is None or name in hooks:
                self.runner.attended(name)
            if between is not None:
                between(name)

    def _compute(self, name: str, output: SchedulerOutput) -> None:
        layer = NAMES.index(name)
        for request_id, count in output.num_scheduled_tokens.items():
            table, request = self.blocks(request_id), self.requests[request_id]
            start = request.num_computed_tokens - count  # schedule() has counted this step already
            for position in range(start, min(start + count, request.num_prompt_tokens)):
                value = pattern(layer, request.prompt_token_ids[position], position)
                self.caches[name][table[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = value

    def _update(self, output: SchedulerOutput, ready: list[str], result: KVConnectorOutput) -> None:
        ids = list(output.num_scheduled_tokens)
        runner = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: index for index, one in enumerate(ids)},
            sampled_token_ids=[[7] if one in ready else [] for one in ids],
            kv_connector_output=result,
        )
        for outputs in self.scheduler.update_from_output(output, runner).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.stats.append(outputs.scheduler_stats.kv_connector_stats)
            for one in outputs.outputs:
                if one.finished:
                    self.finished.append(one.request_id)
                    self.transfer_params[one.request_id] = one.kv_transfer_params

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def pushes(self) -> Any:
        return self.worker.connector_worker.pushes

    def shutdown(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def block_hasher(tokens: int = BLOCK_SIZE) -> Any:
    """vLLM's hasher of blocks of ``tokens`` tokens, for requests that use the prefix cache."""
    init_none_hash(sha256)
    return get_request_block_hasher(tokens, sha256)


def pattern(layer: int, token: int, position: int) -> float:
    return float(layer * 10_000 + position * 10 + token % 7)


def holds_prompt(
    engine: Engine, blocks: list[int], tokens: int, names: Sequence[str] = NAMES, *, first: int = 0
) -> bool:
    """Whether these blocks hold the KV of ``Engine.add``'s prompt in the first layers, ``names``. ``blocks`` are those
    of the whole prompt, whose tokens before ``first`` do not count.
    """
    for layer, name in enumerate(names):
        for position in range(first, tokens):
            cell = engine.caches[name][blocks[position // BLOCK_SIZE], :, position % BLOCK_SIZE]
            if not bool((cell == pattern(layer, 3 + position, position)).all()):
                return False
    return True


class CallingThreads:
    """Notes which thread calls which method of a NIXL agent."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._agent, name)
        if not callable(attribute):
            return attribute

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((threading.current_thread().name, name))
            return attribute(*args, **kwargs)

        return noted
