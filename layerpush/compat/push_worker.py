"""vLLM's push worker with public names for its internals, so that no other folder uses vLLM's private names.

A subclass has the abstract methods at the top of ``VllmPushWorker``, and calls its other public methods. Each section
of the class names the thread that calls its methods.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import queue
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec
from vllm.platforms import current_platform

from layerpush.compat import patches
from layerpush.compat.affinity import Affinity
from layerpush.compat.cache_layout import check_stage, check_transferable
from layerpush.compat.engine_settings import ends_with_flush, split_at, use_one_thread
from layerpush.compat.engine_threads import EngineThreads
from layerpush.compat.handshake import HandshakeAnswer, difference, settings_of, signed
from layerpush.compat.handshake_executor import HandshakeError, HandshakeExecutor, answered_by_layerpush
from layerpush.compat.heartbeats import Heartbeats
from layerpush.compat.leases import SendLeases, extend
from layerpush.compat.links import RankTarget, agent_name, discover_link, mismatch, own_blocks, refusal
from layerpush.compat.pieces import StridedEngine, disguised, regions_of, register_strided, release, size_difference
from layerpush.compat.states import (
    check_stock_p,
    equal_heads_allowed,
    has_whole_groups,
    push_kv_to_all,
    to_all_ranks,
    whole_groups_here,
    whole_groups_there,
)
from layerpush.compat.stats import TransferStats
from layerpush.compat.whole_writes import WholeWrites
from layerpush.core.layout import MAX_DESCRIPTORS, CacheLayout
from layerpush.core.wire import HEARTBEAT_PREFIX, Heartbeat
from layerpush.core.write import MismatchError
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.acknowledged import AcknowledgedTransport
from layerpush.transport.base import Transport
from layerpush.transport.link import Link
from layerpush.transport.locked import LockedAgent
from layerpush.transport.nixl import NixlTransport
from layerpush.transport.peers import Address, Handshake, Peer, Peers, Rank
from layerpush.transport.transfer import Transfer

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(f"vllm.{__name__}")

MAX_REGIONS = 1 << 14
SETUP_FAILED = "transfer_setup_failed"

T = TypeVar("T")
Task = Callable[[], None]


class WriterWaker(Protocol):
    """Wakes the writer thread. Any thread."""

    def wake(self) -> None:
        """There is work."""

    def set(self) -> None:
        """There may be work. vLLM calls it by this name, as on a ``threading.Event``."""


class VllmPushWorker(NixlPushConnectorWorker, ABC):
    """Makes every NIXL call on the writer thread, and lets the writer watch every WRITE.

    vLLM's own thread, ``nixl-push-writer``, stays the writer; it runs the loop given to ``start_writer``. It also sends
    heartbeats and polls whole WRITEs, which vLLM leaves to the main thread. Once the caches are registered,
    only the handshake executor calls NIXL beside the writer; ``LockedAgent`` keeps the two apart.
    """

    nixl_wrapper: Any
    xfer_handshake_metadata: Any
    _handshake_initiation_executor: Any

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, waker: WriterWaker
    ) -> None:
        patches.install(patches.Process.WORKER)
        self._loop: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.threads = EngineThreads()
        use_one_thread(vllm_config)
        with Affinity() as self._cores:
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self._push_writer_wake = waker
        self.nixl_wrapper = LockedAgent(self.nixl_wrapper)
        network = NixlTransport(self.nixl_wrapper, split_at(self, vllm_config))
        acknowledged = None if ends_with_flush(self) else AcknowledgedTransport(network)
        self.transport: Transport = acknowledged or network
        self.acknowledges = acknowledged is not None
        """Whether WRITEs on this network need an answer of the decode rank, which then offers it."""
        self.layout: CacheLayout | None = None
        """This engine's KV cache by layer, if it can be told apart so."""
        self._tasks: deque[tuple[str, Task]] = deque()
        self._noted: list[RankTarget] | None = None
        self._leases = SendLeases()
        self._heartbeats = Heartbeats()
        self.transfer_stats = TransferStats()
        self._whole_writes = WholeWrites(network, acknowledged, self.transfer_stats)
        self._acknowledges = False
        self._whole_groups, self._ranks_there = False, 1
        self.turns: set[str] = set()
        """Turns that this decode engine keeps, by request id. Main thread."""
        self.peers = Peers()
        self._keeps_facts = False
        self._handshake_errors = PeerErrors(logger)
        if patches.is_on("handshakes"):
            self._handshake_initiation_executor = HandshakeExecutor(
                self._handshake_initiation_executor, self._ranks_of, self._difference
            )

    # Hooks of a subclass.

    @abstractmethod
    def whole_write_posted(self, request_id: str, transfer: Transfer, decode_engine_id: str, decode_id: str) -> None:
        """vLLM posted one WRITE of a whole push. Writer thread."""

    @abstractmethod
    def lease_expired(self, request_id: str) -> None:
        """vLLM is about to free the request's blocks. Main thread."""

    @abstractmethod
    def has_writes_in_flight(self, request_id: str) -> bool:
        """Whether a WRITE reads from this request's blocks. Main thread."""

    @abstractmethod
    def may_lapse(self, request_id: str) -> bool:
        """Whether a heartbeat must not prolong this request's lease. Main thread."""

    @abstractmethod
    def end_pushes(self, engine_id: str, reason: str) -> bool:
        """Fail the pushes to an engine. Returns whether no WRITE is on its way to it. Writer thread."""

    @abstractmethod
    def has_writes_to(self, engine_id: str) -> bool:
        """Whether a WRITE is on its way to an engine of this id. Writer thread."""

    @property
    @abstractmethod
    def engines_in_use(self) -> set[str]:
        """Engines that vLLM must not forget, however long they are silent. Any thread."""

    # Handshake executor, and the threads that ask side channels before.

    def _ranks_of(self, tp_size: int, dcp_size: int) -> list[int]:
        """The tensor parallel ranks that vLLM's handshake asks of an engine with these sizes."""
        assert self.transfer_topo is not None
        ranks: list[int] = self.transfer_topo.handshake_target_ranks(tp_size, dcp_size)
        return ranks

    def _difference(self, answer: HandshakeAnswer | None) -> str | None:
        """The settings in which the engine that answered so differs, in one sentence; None if it may connect."""
        return difference(self.xfer_handshake_metadata, answer) if self.enforce_compat_hash else None

    def add_remote_agent(
        self, nixl_agent_meta: Any, remote_tp_rank: int = 0, remote_tp_size: int = 1, remote_dcp_size: int = 1
    ) -> str:
        """Raises ``ValueError`` for absurd sizes, so the handshake fails: vLLM would size its tables by them."""
        regions = nixl_agent_meta.region_num_blocks or [nixl_agent_meta.num_blocks] * len(nixl_agent_meta.block_lens)
        if min(regions, default=0) < 0 or sum(regions) > MAX_DESCRIPTORS or len(regions) > MAX_REGIONS:
            raise ValueError(
                f"engine {nixl_agent_meta.engine_id!r} claims {sum(regions)} blocks in {len(regions)} regions"
            )
        # For ``_build_local_splits_from_plan`` and ``_build_mamba_remote``, which vLLM calls.
        self._ranks_there, self._whole_groups = remote_tp_size, self._check_states(nixl_agent_meta, remote_tp_size)
        other = self._register_strided(nixl_agent_meta, remote_tp_size, remote_dcp_size)
        is_like_ours = other is None or size_difference(self, other) is None
        seen = nixl_agent_meta if is_like_ours else disguised(self, nixl_agent_meta)
        with equal_heads_allowed(self, remote_tp_size):
            name: str = super().add_remote_agent(seen, remote_tp_rank, remote_tp_size, remote_dcp_size)
        push_kv_to_all(self, nixl_agent_meta.engine_id, remote_tp_size)
        if other is not None and remote_tp_rank not in other.regions:
            # vLLM has left those in ``seen`` that belong to a region of ours.
            regions = other.regions[remote_tp_rank] = regions_of(nixl_agent_meta, seen.kv_caches_base_addr)
            self.dst_region_num_blocks[nixl_agent_meta.engine_id] = [region.blocks for region in regions]
        return name

    def _build_local_splits_from_plan(
        self, plan: Any, src_blocks_data: Any, num_fa_descs: int, block_size_ratio: int = 1
    ) -> Iterator[Any]:
        plan = to_all_ranks(self, plan, self._ranks_there)
        for split in super()._build_local_splits_from_plan(plan, src_blocks_data, num_fa_descs, block_size_ratio):
            yield whole_groups_here(self, split, src_blocks_data, num_fa_descs) if self._whole_groups else split

    def _build_mamba_remote(self, nixl_agent_meta: Any, tp_ratio: int, transfer_info: Any) -> Any:
        rows = super()._build_mamba_remote(nixl_agent_meta, tp_ratio, transfer_info)
        convolved = nixl_agent_meta.ssm_sizes[0]
        return whole_groups_there(self, rows, convolved, tp_ratio) if self._whole_groups else rows

    def _add_notif_only_remote_agent(self, metadata: Any, remote_tp_size: int, remote_dcp_size: int = 1) -> str:
        self._check_states(metadata, remote_tp_size)
        self._register_strided(metadata, remote_tp_size, remote_dcp_size)
        name: str = super()._add_notif_only_remote_agent(metadata, remote_tp_size, remote_dcp_size)
        return name

    def _check_states(self, metadata: Any, tp_size: int) -> bool:
        """``has_whole_groups``. Raises ``ValueError`` for a stock P that cannot push to us, too."""
        is_whole = has_whole_groups(self, metadata, tp_size)
        if not answered_by_layerpush():
            check_stock_p(self, tp_size, is_whole=is_whole)
        return is_whole

    def _register_strided(self, metadata: Any, tp_size: int, dcp_size: int) -> StridedEngine | None:
        has_rows = self.layout is not None and bool(self.layout.parts)
        return register_strided(self, metadata, tp_size, dcp_size, has_rows=has_rows)

    # Any thread.

    @property
    def has_copies(self) -> bool:
        """Whether another rank of a prefill context parallel P sends the same KV."""
        return bool(self.pcp_rank > 0 and not self.pcp_dcp_sharded)

    def task(self, task: Task, what: str = "a task") -> None:
        """Queue a task for the writer thread. ``what`` names it in the log if it fails."""
        self._tasks.append((what, task))
        self._push_writer_wake.wake()

    # Main thread: the writer thread's life.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        check_stage(self, kv_caches)
        super().register_kv_caches(kv_caches)
        check_transferable(self, kv_caches)
        self.xfer_handshake_metadata = signed(self.xfer_handshake_metadata, settings_of(self))

    def start_writer(self, loop: Task) -> None:
        """Have the writer thread run ``loop``. Call it after ``register_kv_caches``, which starts the thread."""
        self._loop.put(loop)

    def join_writer(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for the end of the thread. False if it still runs, True if it never ran."""
        thread = getattr(self, "_push_writer_thread", None)
        if thread is None:
            return True
        self._loop.put(None)  # a thread that was given no loop ends, too
        thread.join(timeout_s)
        return not thread.is_alive()

    # Main thread: steps.

    def count_as_sent(self, metadata: NixlConnectorMetadata) -> None:
        """Another rank sends the KV of these requests."""
        self._replicated_pcp_done_sending.update(metadata.reqs_to_send)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        results = super().get_transfer_results()
        self.transfer_stats.feed(self.xfer_stats)  # last: vLLM may not ask again once it has the results
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Always empty. Failed loads are reported by request, because other requests may have the blocks by then."""
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

    def _handle_heartbeat(self, _: str) -> None:
        until = time.perf_counter() + self._lease_extension
        extend(self._reqs_to_send, self._heartbeats.take_requests(), until, self.may_lapse)

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        self._leases.reap(self._reqs_to_send, time.perf_counter(), self.has_writes_in_flight, self.lease_expired)
        now = time.perf_counter()
        for request_id in [each for each in self.turns if self._reqs_to_send.get(each, math.inf) <= now]:
            # vLLM would warn of it, and count it as KV that nobody has fetched in time.
            del self._reqs_to_send[request_id]
            self._reqs_to_process.discard(request_id)
            done_sending.add(request_id)
        super()._reap_expired_send_leases(done_sending)

    def _engines_with_inflight_transfers(self) -> set[str]:
        return self.engines_in_use

    # Writer thread: its loop, and its inboxes.

    def _push_writer_loop(self) -> None:
        with self.threads.watched():
            self._cores.bind_writer()
            loop = self._loop.get()
            if loop is not None:
                loop()

    def use_device(self) -> None:
        """Give this thread the device's context: without one, UCX quietly leaves CUDA IPC out."""
        if not self.use_host_buffer:
            current_platform.set_device(self.device_id)

    def tasks(self) -> Iterator[tuple[str, Task]]:
        """Take the queued tasks, each with its name for the log."""
        while self._tasks:
            yield self._tasks.popleft()

    def ended_requests(self) -> Iterator[str]:
        """Take P's requests that the main thread has reported as sent, or whose lease is over."""
        for request_id in _drained(self._evict_finished_inbox):
            yield request_id
            self._leases.forget(request_id)

    def deferred_pushes(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Take whole pushes whose handshake is over: request, blocks, registration."""
        yield from _drained(self._deferred_push_inbox)

    # Writer thread: whole pushes.

    def push_whole(self, request_id: str, blocks: Any, registration: dict[str, Any]) -> None:
        """Start vLLM's whole push, unless the lease has ended. vLLM attaches the completion to the WRITE."""
        self._acknowledges = bool(registration.get("acknowledges"))
        with self._leases.posting(request_id) as lives:
            if lives:
                self._do_start_push_kv(request_id, blocks, registration)

    def report_sent(self, request_id: str) -> None:
        """Have the main thread report the request as sent: its push is over, with or without success."""
        with self._sending_transfers_lock:
            self._send_failures.discard(request_id)
            self._sending_transfers[request_id] = []

    def whole_write_ended(self, request_id: str, transfer: Transfer, landed: bool) -> None:
        """Account for one of vLLM's WRITEs as vLLM would, while its handle is still valid."""
        if landed:
            self._whole_writes.landed(self.nixl_wrapper, request_id, transfer)
            return
        self.transfer_stats.failed()
        with self._sending_transfers_lock:
            self._send_failures.add(request_id)

    def _log_failure(self, failure_type: str, req_id: str | None, *args: Any, **kwargs: Any) -> None:
        error = kwargs.get("error")
        if isinstance(error, HandshakeError):  # many may fail at once: one line a second, without a traceback
            engine = kwargs.get("remote_engine_id")
            self._handshake_errors.count(
                "handshake", f"no handshake with engine {engine}: {error}", time.perf_counter()
            )
        elif failure_type == SETUP_FAILED and req_id is not None and error is not None:
            self._whole_writes.setup_failed(req_id, error)  # it is logged with the push that it ends
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
        **kwargs: Any,
    ) -> int | None:
        """Post vLLM's WRITE and hand it to the writer. Returns no handle, so vLLM polls nothing."""
        if self._noted is not None:
            self._noted.append(RankTarget(read_spec, local_xfer_side_handle, remote_xfer_side_handle))
            return None
        transfer = self._whole_writes.post(
            self,
            partial(
                super()._xfer_blocks,
                own_blocks(self, dst_engine_id, read_spec),
                dst_engine_id,
                request_id,
                remote_request_id,
                local_xfer_side_handle,
                remote_xfer_side_handle,
                **kwargs,
            ),
            request_id,
            agent_name(self._remote_agents[dst_engine_id][(0, read_spec.remote_rank)]),
            read_spec.remote_rank,
            acknowledges=self._acknowledges,
        )
        if transfer is not None:
            self.whole_write_posted(request_id, transfer, dst_engine_id, remote_request_id)
        return None

    # Writer thread: connections (layerpush.transport.connections.Network).

    def handshake(self, address: Address) -> Handshake | None:
        pending = self._ensure_handshake(
            address.engine_id,
            address.host,
            address.port,
            address.tp_size,
            pp_size=address.pp_size,
            notif_agents_only=address.notify_only,
        )
        return None if pending is None else self.peers[address.engine_id].handshake

    def _ensure_handshake(
        self,
        engine_id: str,
        host: str,
        port: int,
        tp_size: int,
        dcp_size: int = 1,
        pp_size: int = 1,
        notif_agents_only: bool = False,
    ) -> Future[Any] | None:
        """Note the address of each handshake: vLLM begins some by itself, for heartbeats and whole pushes."""
        pending: Future[Any] | None = super()._ensure_handshake(
            engine_id, host, port, tp_size, dcp_size, pp_size, notif_agents_only
        )
        if pending is None:
            return None
        peer = self.peers[engine_id]
        if peer.handshake is None or peer.handshake.pending is not pending:
            address = Address(engine_id, host, port, tp_size, pp_size, notif_agents_only)
            peer.handshake = Handshake(pending, address)
            pending.add_done_callback(lambda _: self.task(partial(_forget_if_failed, peer), "a handshake"))
        return pending

    def engines(self) -> list[str]:
        with self._handshake_lock:
            return list(self._remote_agents)

    def agents_of(self, engine_id: str) -> dict[str, Rank]:
        with self._handshake_lock:
            return {agent_name(name): rank for rank, name in (self._remote_agents.get(engine_id) or {}).items()}

    def clock_offset(self, engine_id: str) -> float | None:
        """How many seconds a connected engine's clock is ahead of ours, as the handshake measured it."""
        with self._handshake_lock:
            offset: float | None = self._engine_clock_offset.get(engine_id)
        return offset

    def disconnect(self, engine_id: str) -> None:
        if not self.agents_of(engine_id):
            return
        assert self.transfer_topo is not None
        if not self._keeps_facts:
            # The main thread may still look up this engine for the statistics of a load: a KeyError ends our engine.
            self.transfer_topo.get_engine_info = partial(_facts_of, self.transfer_topo.get_engine_info, self.peers)
            self._keeps_facts = True
        peer = self.peers[engine_id]
        peer.facts = self.transfer_topo.get_engine_info(engine_id)
        self.peers.keep(peer)
        self._cleanup_remote_engine(engine_id, log_eviction=False)

    def retire(self, engine_id: str) -> Callable[[], None]:
        with self.nixl_wrapper.postponed("release_dlist_handle", "remove_remote_agent") as releases:
            self.disconnect(engine_id)

        def release() -> None:
            for each in releases:
                each()

        return release

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        peer = self.peers.get(engine_id)
        handshake = None if peer is None else peer.handshake
        if peer is not None:
            peer.link = None  # first: its descriptors end now
        assert self.transfer_topo is not None
        if isinstance(info := self.transfer_topo._engines.get((engine_id, 0)), StridedEngine):
            release(self, info)
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
        if peer is not None and peer.handshake is handshake:  # vLLM may clean up on the main thread, too
            peer.handshake = None

    def touch_engine(self, engine_id: str) -> None:
        """Note that the engine is in use, so that vLLM does not forget it as stale."""
        self._engine_last_active[engine_id] = time.perf_counter()

    def mismatch(self, engine_id: str) -> str | None:
        """The reason why no push between a connected engine and this one can be right; None if one can."""
        reason = mismatch(self, engine_id, self.layout)
        return None if reason is None else f"engine {engine_id!r} does not fit: {reason}"

    def check_targets(self, engine_id: str, blocks: Sequence[Sequence[int]]) -> None:
        """Raises ``MismatchError`` for a block id that a connected decode engine does not have, in any group."""
        assert self.transfer_topo is not None
        pages = self.transfer_topo.get_engine_info(engine_id).remote_physical_blocks_per_logical
        limit = min(self.dst_region_num_blocks[engine_id]) // pages
        last = max((block for group in blocks for block in group), default=0)
        if last >= limit:
            raise MismatchError(f"block {last} lies outside a region of {limit} blocks on decode engine {engine_id}")

    def counts_blocks_like(self, engine_id: str) -> bool:
        """Whether a connected decode engine has blocks of as many tokens as ours, and as many regions."""
        return refusal(self, engine_id) is None

    def has_equal_block_size(self, engine_id: str) -> bool:
        """Whether a connected engine's blocks have as many tokens as ours."""
        assert self.transfer_topo is not None
        return size_difference(self, self.transfer_topo.get_engine_info(engine_id)) is None

    def discover_link(self, engine_id: str) -> Link:
        """The link to a connected decode engine. Raises ``MismatchError`` if blocks of other sizes cannot be cut."""
        return discover_link(self, engine_id, self._note_writes, self.layout)

    def _note_writes(self, request: ReqMeta) -> list[RankTarget]:
        """The WRITEs that vLLM would post for ``request``: ``_xfer_blocks`` notes and drops them."""
        noted: list[RankTarget] = []
        self._noted = noted
        try:
            self._xfer_blocks_for_req("layerpush-link", request)
        finally:
            self._noted = None
        return noted

    # Writer thread: loads, and messages that vLLM reads.

    def knows(self, request_id: str) -> bool:
        """Whether the engine's main thread tracks the request: an outcome before that would be lost."""
        return request_id in self._recving_metadata

    def loaded(self, completions: Sequence[bytes]) -> None:
        """Every byte of a load is there. The notifications of the prefill ranks, as they came."""
        for completion in completions:
            self.pass_on(completion)

    def failed(self, request_id: str) -> None:
        """A load failed: vLLM applies ``kv_load_failure_policy`` to the request."""
        self._failed_recv_reqs.put(request_id)

    def heartbeat(self, message: Heartbeat) -> None:
        """Hand the requests of a heartbeat to vLLM's main thread."""
        if self._heartbeats.add_requests(message.request_ids):
            self.pass_on(HEARTBEAT_PREFIX)

    def pass_on(self, notification: bytes) -> None:
        """Hand a completion, or the news of a heartbeat, to vLLM's main thread."""
        self._pending_completion_notifs.put(notification)


def _drained(inbox: queue.Queue[T]) -> Iterator[T]:
    while True:
        try:
            yield inbox.get_nowait()
        except queue.Empty:
            return


def _forget_if_failed(peer: Peer) -> None:
    handshake = peer.handshake
    if handshake is None or not handshake.pending.done():
        return
    if handshake.pending.cancelled() or handshake.pending.exception() is not None:
        peer.handshake = None


def _facts_of(connected: Callable[..., Any], peers: Peers, engine_id: str, pp_rank: int = 0) -> Any:
    """vLLM's facts about an engine; after a disconnection, the last known ones."""
    try:
        return connected(engine_id, pp_rank)
    except KeyError:
        peer = peers.get(engine_id)
        if peer is None or peer.facts is None:
            raise
        return peer.facts
