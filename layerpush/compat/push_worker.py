"""Upstream's push worker, opened up where layerpush takes part."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id
from vllm.logger import init_logger
from vllm.platforms import current_platform

from layerpush.compat.affinity import Affinity
from layerpush.compat.facts import probe_meta, refusal, share, split_at
from layerpush.core.coverage import MismatchError
from layerpush.core.layout import MAX_DESCRIPTORS
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import Route, TransportError
from layerpush.transport.connections import Address, Rank
from layerpush.transport.link import Link
from layerpush.transport.locked import LockedAgent
from layerpush.transport.nixl import NixlTransport
from layerpush.transport.writes import Transfer

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.layerpush.compat")

LEASE_GRACE_S = 1.0
LEASE_SLACK_S = 0.1
DEPARTED_KEPT = 1024
MAX_REGIONS = 1 << 14
SETUP_FAILED = "transfer_setup_failed"


class VllmPushWorker(NixlPushConnectorWorker):
    """Upstream's push worker with every NIXL call moved off the engine's main thread and every WRITE watchable.

    Upstream's own thread (``nixl-push-writer``) stays the writer. Heartbeats and the polling of whole-request WRITEs,
    which upstream leaves to the main thread, run on it too. ``LockedAgent`` keeps it apart from the handshake
    executor, the only other thread that calls NIXL once the caches are registered.
    """

    nixl_wrapper: Any

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        with Affinity() as self._cores:
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self.nixl_wrapper = LockedAgent(self.nixl_wrapper)
        self.transport = NixlTransport(self.nixl_wrapper, split_at(self, vllm_config))
        self._tasks: deque[Callable[[], None]] = deque()
        self._telemetry: deque[Any] = deque()
        self._probed: list[tuple[ReadSpec, int, int]] | None = None
        self._lease_lock = threading.Lock()  # never held across a NIXL call
        self._posting: set[str] = set()
        self._expired: set[str] = set()
        self._departed: dict[str, Any] = {}
        self._setup_failures: dict[str, BaseException] = {}

    # What a subclass adds.

    def whole_write_posted(self, request_id: str, transfer: Transfer, decode_engine_id: str, decode_id: str) -> None:
        """Upstream posted one WRITE of a whole-request push. Writer thread."""
        raise NotImplementedError

    def lease_expired(self, request_id: str) -> None:
        """The request's blocks are about to be freed. Main thread."""
        raise NotImplementedError

    def has_writes_in_flight(self, request_id: str) -> bool:
        """Whether a WRITE reads from this request's blocks. Main thread."""
        raise NotImplementedError

    # Handshake executor.

    def add_remote_agent(self, nixl_agent_meta: Any, *args: Any, **kwargs: Any) -> str:
        """Upstream sizes its tables by what the peer claims to have: claims beyond reason are refused. Raises
        ``ValueError``, which fails the handshake.
        """
        regions = nixl_agent_meta.region_num_blocks or [nixl_agent_meta.num_blocks] * len(nixl_agent_meta.block_lens)
        if min(regions, default=0) < 0 or sum(regions) > MAX_DESCRIPTORS or len(regions) > MAX_REGIONS:
            raise ValueError(
                f"engine {nixl_agent_meta.engine_id!r} claims {sum(regions)} blocks in {len(regions)} regions"
            )
        name: str = super().add_remote_agent(nixl_agent_meta, *args, **kwargs)
        return name

    # Main thread.

    def task(self, task: Callable[[], None]) -> None:
        """Have the writer thread do something soon."""
        self._tasks.append(task)
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
        self.task(partial(super()._send_heartbeats, snapshot))

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
        while self._tasks:
            yield self._tasks.popleft()

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

    # Writer thread: connections (layerpush.transport.connections.Network).

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

    def rank_of(self, engine_id: str, agent: str) -> Rank | None:
        with self._handshake_lock:
            ranks: dict[Rank, str] = self._remote_agents.get(engine_id) or {}
        return next((rank for rank, name in ranks.items() if _agent_name(name) == agent), None)

    def clock_offset(self, engine_id: str) -> float | None:
        """What a connected engine's clock is ahead of ours, in seconds, as the handshake measured it."""
        with self._handshake_lock:
            offset: float | None = self._engine_clock_offset.get(engine_id)
        return offset

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

    def counts_blocks_like(self, engine_id: str) -> bool:
        """Whether a block here is as many tokens as one on a connected decode engine."""
        return refusal(self, engine_id) is None

    # Writer thread: loads (layerpush.decode.outcomes.LoadHost).

    def knows(self, request_id: str) -> bool:
        return request_id in self._recving_metadata

    def loaded(self, completions: Sequence[bytes]) -> None:
        for completion in completions:
            self._pending_completion_notifs.put(completion)

    def failed(self, request_id: str) -> None:
        self._failed_recv_reqs.put(request_id)

    def whole_write_ended(self, request_id: str, transfer: Transfer, landed: bool) -> None:
        """Account for one of upstream's WRITEs as upstream would, while its handle is still valid."""
        if landed:
            try:
                telemetry = self.nixl_wrapper.get_xfer_telemetry(transfer.handle)
            except Exception as error:  # noqa: BLE001  NIXL builds differ in theirs; the WRITE has landed
                logger.warning("NIXL has no telemetry of a WRITE of %s: %s", request_id, error)
                return
            transfer.record.descriptors, transfer.record.bytes = telemetry.descCount, telemetry.totalBytes
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
                self._xfer_blocks_for_req("layerpush-probe", probe_meta(self, engine_id))
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
            Route(_agent_name(agents[(0, spec.remote_rank)]), spec.remote_rank, local, remote)
            for spec, local, remote in probed
        )
        return Link(engine_id, routes, tuple(self.dst_region_num_blocks[engine_id]), share=share(self, engine_id))

    def _log_failure(self, failure_type: str, req_id: str | None, *args: Any, **kwargs: Any) -> None:
        error = kwargs.get("error")
        if failure_type == SETUP_FAILED and req_id is not None and error is not None:
            self._setup_failures[req_id] = error  # it will be logged with the push that it ends
        else:
            super()._log_failure(failure_type, req_id, *args, **kwargs)

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
        agent, post = self.nixl_wrapper, self.transport.noted()
        self.nixl_wrapper = post
        try:
            handle = super()._xfer_blocks(
                read_spec, dst_engine_id, request_id, remote_request_id, local_xfer_side_handle, remote_xfer_side_handle
            )
        finally:
            self.nixl_wrapper = agent
        error = self._setup_failures.pop(request_id, None)
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
            name = _agent_name(self._remote_agents[dst_engine_id][(0, read_spec.remote_rank)])
            self.transport.adopt(handle, post, name, read_spec.remote_rank)
            self.whole_write_posted(
                request_id, Transfer(self.transport, record, handle), dst_engine_id, remote_request_id
            )
        elif error is not None:  # it could not even be prepared, and upstream would go on regardless
            raise TransportError(f"a WRITE could not be prepared: {error}") from error
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
