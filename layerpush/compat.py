"""Everything layerpush knows of vLLM's private names (0.32; 0.33 differs little). Nothing else may use them.

Facts about the base worker and scheduler are read here and handed on as layerpush's own types.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPushConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlConnectorMetadata,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id
from vllm.logger import init_logger
from vllm.platforms import current_platform

from layerpush.layout import CacheLayout, LayerCache, LayoutError, Region, match_layers, named_layers
from layerpush.peers import Address
from layerpush.prefill.coverage import MismatchError
from layerpush.prefill.outbox import RankWrite
from layerpush.prefill.plan import StepPlan
from layerpush.prefill.staging import Link
from layerpush.trace import WriteRecord
from layerpush.transport.base import Route
from layerpush.transport.locked import LockedAgent
from layerpush.transport.nixl import NixlTransport

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.layerpush.compat")

LEASE_GRACE_S = 1.0
LEASE_SLACK_S = 0.1
DEPARTED_KEPT = 1024

__all__ = [
    "GET_META_MSG",
    "LayerwiseMetadata",
    "NixlBaseConnector",
    "NixlConnectorMetadata",
    "NixlPushConnector",
    "NixlPushConnectorScheduler",
    "StagedRegistration",
    "WatchedPushWorker",
    "agent_of_handshake",
    "awaits_scheduling",
    "block_sizes",
    "cache_layout",
    "device_of",
    "engine_fallback",
    "get_base_request_id",
    "handshake_query",
    "is_streamed",
    "prompt_digest",
    "registration_timeout",
    "runs_in_microbatches",
    "take_staged_registration",
    "withdraw_receive",
    "worker_fallback",
]


class LayerwiseMetadata(NixlConnectorMetadata):
    """Upstream's metadata of a step, and what layerpush's scheduler has to tell its workers beside it."""

    step_plan: StepPlan = StepPlan()
    prompt_digests: Mapping[str, str] = MappingProxyType({})
    """Of requests that this prefill engine has begun with, by their ids."""
    cancelled: Mapping[str, str] = MappingProxyType({})
    """Pushes that this decode engine gives up: its request ids, and why."""

    @classmethod
    def extending(
        cls,
        metadata: NixlConnectorMetadata,
        plan: StepPlan,
        prompt_digests: Mapping[str, str],
        cancelled: Mapping[str, str],
    ) -> LayerwiseMetadata:
        extended = cls.__new__(cls)
        extended.__dict__.update(metadata.__dict__)
        extended.step_plan = plan
        extended.prompt_digests = prompt_digests
        extended.cancelled = cancelled
        return extended


class WatchedPushWorker(NixlPushConnectorWorker):
    """Upstream's push worker with every NIXL call moved off the engine's main thread and every WRITE watchable.

    Upstream's own thread (``nixl-push-writer``) stays the writer. Heartbeats and the polling of whole-request WRITEs,
    which upstream leaves to the main thread, run on it too. ``LockedAgent`` keeps it apart from the handshake
    executor, the only other thread that calls NIXL once the caches are registered.
    """

    nixl_wrapper: Any

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.nixl_wrapper = LockedAgent(self.nixl_wrapper)
        self.transport = NixlTransport(self.nixl_wrapper)
        self._errands: deque[Callable[[], None]] = deque()
        self._telemetry: deque[Any] = deque()
        self._probed: list[tuple[ReadSpec, int, int]] | None = None
        self._lease_lock = threading.Lock()  # never held across a NIXL call
        self._posting: set[str] = set()
        self._expired: set[str] = set()
        self._departed: dict[str, Any] = {}

    # What a subclass adds.

    def whole_write_posted(self, request_id: str, part: RankWrite, decode_engine_id: str, decode_id: str) -> None:
        """Upstream posted one WRITE of a whole-request push. Writer thread."""
        raise NotImplementedError

    def lease_expired(self, request_id: str) -> None:
        """The request's blocks are about to be freed. Main thread."""
        raise NotImplementedError

    def has_writes_in_flight(self, request_id: str) -> bool:
        """Whether a WRITE reads from this request's blocks. Main thread."""
        raise NotImplementedError

    # Main thread.

    def errand(self, errand: Callable[[], None]) -> None:
        """Have the writer thread do something soon."""
        self._errands.append(errand)
        self._push_writer_wake.set()

    def get_transfer_results(self) -> KVConnectorTransferResults:
        while self._telemetry:
            self.xfer_stats.record_transfer(self._telemetry.popleft())
        return super().get_transfer_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """None: a failed load is named by its request. By then others may have these blocks, and would suffer."""
        super().get_block_ids_with_load_errors()
        return set()

    def _send_heartbeats(self, metadata: NixlConnectorMetadata) -> None:
        """Heartbeats are NIXL calls, so the writer sends them; the scheduler may change its own copy meanwhile."""
        if not metadata.heartbeat_by_engine:
            return
        snapshot = NixlConnectorMetadata()
        snapshot.heartbeat_by_engine = {
            engine_id: dataclasses.replace(info, req_ids=set(info.req_ids))
            for engine_id, info in metadata.heartbeat_by_engine.items()
        }
        self.errand(partial(super()._send_heartbeats, snapshot))

    def _handle_heartbeat(self, payload: str) -> None:
        """Extend leases. A router that asks both engines at once knows no more of P's request than its base id."""
        named = set(payload.split(","))
        bases = {get_base_request_id(name) for name in named}
        for request_id in self._reqs_to_send:
            if request_id in named or get_base_request_id(request_id) in bases:
                expires = max(self._reqs_to_send[request_id], time.perf_counter() + self._lease_extension)
                self._reqs_to_send[request_id] = expires

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        """No lease expires while a WRITE reads from the request's blocks, and none is posted after it expired.

        What is due, or would be by the time upstream looks at the clock again, is either kept or ended here.
        """
        now = time.perf_counter()
        with self._lease_lock:
            due = [request_id for request_id, expires in self._reqs_to_send.items() if expires <= now + LEASE_SLACK_S]
            for request_id in due:
                if request_id in self._posting or self.has_writes_in_flight(request_id):
                    self._reqs_to_send[request_id] = now + LEASE_GRACE_S
                else:
                    self._reqs_to_send[request_id] = now
                    self._expired.add(request_id)
                    self.lease_expired(request_id)
        super()._reap_expired_send_leases(done_sending)

    # Writer thread.

    def use_device(self) -> None:
        """Give this thread the device's context: without one, UCX quietly leaves CUDA IPC out."""
        if not self.use_host_buffer:
            current_platform.set_device(self.device_id)

    def take_errands(self) -> Iterator[Callable[[], None]]:
        while self._errands:
            yield self._errands.popleft()

    def push_whole(self, request_id: str, blocks: Any, registration: dict[str, Any]) -> None:
        """Start upstream's whole-request push, unless the lease has ended: its completion rides on the WRITE."""
        with self._lease_lock:
            if request_id in self._expired:
                return
            self._posting.add(request_id)
        try:
            self._do_start_push_kv(request_id, blocks, registration)
        finally:
            with self._lease_lock:
                self._posting.discard(request_id)

    def lease_settled(self, request_id: str) -> None:
        """Nothing of the request is left here that a push could start from."""
        with self._lease_lock:
            self._expired.discard(request_id)

    def report_sent(self, request_id: str) -> None:
        """Let the main thread's next look report the request as over: it was sent, or never will be."""
        with self._sending_transfers_lock:
            self._send_failures.discard(request_id)
            self._sending_transfers[request_id] = []

    # Writer thread: connections (layerpush.peers.Network).

    def handshake(self, address: Address) -> Future[Any] | None:
        pending: Future[Any] | None = self._ensure_handshake(
            address.engine_id,
            address.host,
            address.port,
            address.tp_size,
            pp_size=address.pp_size,
            notif_agents_only=address.notify_only,
        )
        return pending

    def agents_of(self, engine_id: str) -> tuple[str, ...]:
        with self._handshake_lock:
            return tuple(map(_agent_name, (self._remote_agents.get(engine_id) or {}).values()))

    def rank_of(self, engine_id: str, agent: str) -> tuple[int, int]:
        with self._handshake_lock:
            ranks: dict[tuple[int, int], str] = self._remote_agents.get(engine_id) or {}
        return next((rank for rank, name in ranks.items() if _agent_name(name) == agent), (0, 0))

    def disconnect(self, engine_id: str) -> None:
        if not self.agents_of(engine_id):
            return
        assert self.transfer_topo is not None
        if not self._departed:
            # The main thread may be about to account for a load from this engine: a KeyError there ends ours.
            self.transfer_topo.get_engine_info = partial(_info_of, self.transfer_topo.get_engine_info, self._departed)
        self._departed.pop(engine_id, None)
        self._departed[engine_id] = self.transfer_topo.get_engine_info(engine_id)
        while len(self._departed) > DEPARTED_KEPT:
            self._departed.pop(next(iter(self._departed)))
        self._cleanup_remote_engine(engine_id, log_eviction=False)

    def touch_engine(self, engine_id: str) -> None:
        """The engine is in use: it is not stale."""
        self._engine_last_active[engine_id] = time.perf_counter()

    def check_targets(self, engine_id: str, blocks: Sequence[Sequence[int]]) -> None:
        """Raises ``MismatchError`` for a block that a connected decode engine does not have."""
        assert self.transfer_topo is not None
        pages = self.transfer_topo.get_engine_info(engine_id).remote_physical_blocks_per_logical
        limit = min(self.dst_region_num_blocks[engine_id]) // pages
        last = max((block for group in blocks for block in group), default=0)
        if last >= limit:
            raise MismatchError(f"block {last} lies outside a region of {limit} blocks on decode engine {engine_id}")

    # Writer thread: loads (layerpush.decode.desk.Loads).

    def knows(self, request_id: str) -> bool:
        return request_id in self._recving_metadata

    def loaded(self, completions: list[bytes]) -> None:
        for completion in completions:
            self._pending_completion_notifs.put(completion)

    def failed(self, request_id: str) -> None:
        self._failed_recv_reqs.put(request_id)

    def whole_write_ended(self, request_id: str, part: RankWrite, landed: bool) -> None:
        """Account for one of upstream's WRITEs as upstream would, while its handle is still valid."""
        if landed:
            try:
                telemetry = self.nixl_wrapper.get_xfer_telemetry(part.handle)
            except Exception as error:  # noqa: BLE001  NIXL builds differ in theirs; the WRITE has landed
                logger.warning("NIXL has no telemetry of a WRITE of %s: %s", request_id, error)
                return
            part.record.descriptors, part.record.bytes = telemetry.descCount, telemetry.totalBytes
            self._telemetry.append(telemetry)
            return
        self.xfer_stats.record_failed_transfer()
        with self._sending_transfers_lock:
            self._send_failures.add(request_id)

    def probe(self, engine_id: str) -> Link:
        """Let upstream's tensor-parallel logic write a made-up request, and keep where it would have gone."""
        reason = refusal(self, engine_id)
        probed: list[tuple[ReadSpec, int, int]] = []
        if reason is None:
            self._probed = probed
            try:
                self._xfer_blocks_for_req("layerpush-probe", _probe_meta(self, engine_id))
            except (NotImplementedError, AssertionError) as error:
                reason = f"upstream cannot map it: {error}"
            finally:
                self._probed = None
        if reason is None and not all(all(spec.local_block_ids) for spec, _, _ in probed):
            reason = "some KV cache groups go to other ranks than the rest"
        if reason is not None:
            return Link(engine_id, (), (), refusal=reason)
        agents = self._remote_agents[engine_id]
        routes = tuple(
            Route(agents[(0, spec.remote_rank)], spec.remote_rank, local, remote) for spec, local, remote in probed
        )
        return Link(engine_id, routes, tuple(self.dst_region_num_blocks[engine_id]), share=_share(self, engine_id))

    def _xfer_blocks(
        self,
        read_spec: ReadSpec,
        dst_engine_id: str,
        request_id: str,
        remote_request_id: str,
        local_xfer_side_handle: int,
        remote_xfer_side_handle: int,
    ) -> int | None:
        """Post upstream's WRITE and have it watched: the main thread must not poll NIXL, so it gets no handle."""
        if self._probed is not None:
            self._probed.append((read_spec, local_xfer_side_handle, remote_xfer_side_handle))
            return None
        started = time.perf_counter()
        handle = super()._xfer_blocks(
            read_spec, dst_engine_id, request_id, remote_request_id, local_xfer_side_handle, remote_xfer_side_handle
        )
        if handle is not None:
            record = WriteRecord(
                remote_rank=read_spec.remote_rank,
                layers=(0, self.num_regions - 1),
                chunks=(0, 0),
                descriptors=0,
                bytes=0,
                t_post=started,
                t_posted=time.perf_counter(),
            )
            self.transport.adopt(handle)
            self.whole_write_posted(request_id, RankWrite(handle, record), dst_engine_id, remote_request_id)
        return None


def _agent_name(name: str | bytes) -> str:
    """NIXL names an agent that was added in bytes, and the sender of a notification in a string."""
    return name.decode() if isinstance(name, bytes) else name


def _info_of(connected: Callable[..., Any], departed: dict[str, Any], engine_id: str, pp_rank: int = 0) -> Any:
    """What is known of an engine, or was when the connection to it ended."""
    try:
        return connected(engine_id, pp_rank)
    except KeyError:
        return departed[engine_id]


def is_streamed(request: Any) -> bool:
    """Whether a vLLM request is to be pushed from this engine."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))


def handshake_query(pp_rank: int, tp_rank: int) -> bytes:
    """What a side channel is asked for a rank's agent."""
    return msgspec.msgpack.encode((GET_META_MSG, pp_rank, tp_rank))


class _HandshakeAnswer(msgspec.Struct):
    """``NixlHandshakePayload``, as far as it is needed to tell incarnations of an engine apart."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


class _AgentDescription(msgspec.Struct):
    """``NixlAgentMetadata``, likewise; the rest, which may be long, is skipped and not built."""

    engine_id: str
    agent_metadata: bytes


def agent_of_handshake(payload: bytes) -> bytes:
    """NIXL's own description of an agent, which has its name in it, from a side channel's answer.

    Raises ``ValueError`` for any other bytes, or ``RecursionError``.
    """
    handshake = msgspec.msgpack.decode(payload, type=_HandshakeAnswer)
    return msgspec.msgpack.decode(handshake.agent_metadata_bytes, type=_AgentDescription).agent_metadata


def registration_timeout(scheduler: NixlPushConnectorScheduler) -> float:
    """Seconds that a decode engine waits for a push, upstream's ``push_registration_timeout``."""
    return float(scheduler._push_registration_timeout)


@dataclasses.dataclass(frozen=True, slots=True)
class StagedRegistration:
    """``message`` may be extended until the step's metadata is built; ``blocks`` are those that it names."""

    message: dict[str, Any]
    blocks: list[KVCacheBlock]


def take_staged_registration(
    scheduler: NixlPushConnectorScheduler, request_id: str, blocks: KVCacheBlocks
) -> StagedRegistration | None:
    """A registration that upstream has just staged for these blocks, once for each; None when it staged none.

    Upstream's own watch over it ends here: it would only log, and forget the request.
    """
    if scheduler._push_registration_deadlines.pop(request_id, None) is None:
        return None
    message = scheduler._push_pending_registrations[request_id]
    tables = scheduler.kv_cache_config.select_transfer_block_ids(blocks.blocks)
    registered = [
        block
        for ids, table in zip(map(set, message["local_block_ids"]), tables, strict=True)
        for block in table
        if block.block_id in ids and not block.is_null
    ]
    return StagedRegistration(message, registered)


def prompt_digest(scheduler: NixlPushConnectorScheduler, request: Request) -> str | None:
    """Equal on both sides of a push for equal prompts; None where that cannot be said."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None or scheduler._prefill_backoff():
        return None
    digest = hashlib.blake2b(array("i", request.prompt_token_ids).tobytes(), digest_size=16)
    adapter = request.lora_request.lora_name if request.lora_request else ""
    for name in (adapter, *(feature.identifier for feature in request.mm_features)):
        digest.update(b"\0" + name.encode())
    return digest.hexdigest()


def awaits_scheduling(request: Any) -> bool:
    """Whether a decode engine has not come to registering this request's blocks."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def withdraw_receive(scheduler: NixlPushConnectorScheduler, request_id: str) -> None:
    """Workers shall not await what nobody was asked for: upstream's would, for ever."""
    scheduler._reqs_need_recv.pop(request_id, None)


def block_sizes(kv_cache_config: Any) -> tuple[int, ...]:
    """Tokens per block of each transferable KV cache group."""
    return tuple(group.kv_cache_spec.block_size for group in kv_cache_config.transfer_groups)


def engine_fallback(side: NixlPushConnectorScheduler | NixlPushConnectorWorker) -> str | None:
    """Why this engine must push whole requests, as far as its scheduler and its workers both can tell."""
    if side.use_host_buffer:
        return "the KV cache is staged in a host buffer (kv_buffer_device=cpu)"
    if side._has_mamba:
        return "the model has Mamba layers, whose state is not written block by block"
    return None


def worker_fallback(worker: NixlPushConnectorWorker) -> str | None:
    """Why this worker must push whole requests, beside a layout that cannot be told apart by layer."""
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
    """Layer by layer, where the worker registered its KV cache. Call after ``register_kv_caches``.

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
    """Whether a step's forward is split, so that a layer's hook fires before all of the layer is computed."""
    return bool(vllm_config.parallel_config.use_ubatching)


def device_of(kv_caches: dict[str, Any]) -> torch.device:
    """Where the KV cache lives; a Mamba layer's is a sequence of tensors."""
    cache = next(iter(kv_caches.values()))
    tensor: torch.Tensor = cache[0] if isinstance(cache, list | tuple) else cache
    return tensor.device


def refusal(worker: NixlPushConnectorWorker, engine_id: str) -> str | None:
    """Why a decode engine's blocks cannot be written layer by layer; None when they can."""
    assert worker.transfer_topo is not None
    remote = worker.transfer_topo.get_engine_info(engine_id)
    if worker.transfer_topo.block_size_ratio(remote.remote_block_size) != 1:
        return f"its block size is {remote.remote_block_size} tokens, ours {worker.block_size}"
    if remote.remote_physical_blocks_per_logical != worker._physical_blocks_per_logical_kv_block:
        return (
            f"its blocks are {remote.remote_physical_blocks_per_logical} kernel blocks, "
            f"ours {worker._physical_blocks_per_logical_kv_block}"
        )
    local, theirs = worker.dst_region_num_blocks[worker.engine_id], worker.dst_region_num_blocks[engine_id]
    if len(local) != len(theirs):
        return f"it registered {len(theirs)} regions, we {len(local)}"
    return None


def _share(worker: NixlPushConnectorWorker, engine_id: str) -> float:
    """The part of each of our blocks that one decode rank gets: all of it, or its share of the heads."""
    assert worker.transfer_topo is not None
    remote = worker.transfer_topo.get_engine_info(engine_id)
    ratio = worker.transfer_topo.tp_ratio(remote.remote_tp_size)
    return -1.0 / ratio if ratio < 0 and not worker.use_mla else 1.0


def _probe_meta(worker: NixlPushConnectorWorker, engine_id: str) -> ReqMeta:
    """A made-up request with one block per group: shows where upstream would write it."""
    blocks = tuple([0] for _ in worker.kv_cache_config.transfer_groups)
    physical = worker._logical_to_kernel_block_ids(blocks, worker._physical_blocks_per_logical_kv_block)
    remote = RemoteMeta(block_ids=blocks, host="", port=0, engine_id=engine_id, request_id="")
    return ReqMeta(local_block_ids=blocks, local_physical_block_ids=physical, tp_size=worker.world_size, remote=remote)


def _span(cache: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    return int((last + 1) * cache.element_size())


def _model_order(cache: LayerCache) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", cache.name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
