"""The worker's half: glue between vLLM's push worker and layerpush's writer.

Threads. The engine's main thread calls the public methods; it only appends to queues, and it never calls NIXL once
the caches are registered. The writer thread (``nixl-push-writer``, started by the base class) runs
``_push_writer_loop`` and makes every NIXL call but those of a handshake; see ``compat.WatchedPushWorker``.
``LockedAgent`` keeps those two apart; the main thread never takes its lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from vllm.logger import init_logger

from layerpush import compat
from layerpush.config import LayerPushConfig
from layerpush.decode.receiver import Receiver
from layerpush.layout import CacheLayout, LayoutError
from layerpush.prefill.capture import Capture
from layerpush.prefill.fences import fences_for
from layerpush.prefill.host import Identity
from layerpush.prefill.ledger import Ledger
from layerpush.prefill.outbox import RankWrite
from layerpush.prefill.policy import Policy
from layerpush.prefill.push import BlockIds
from layerpush.prefill.staging import Link
from layerpush.prefill.writer import PushWriter
from layerpush.trace import TraceFile
from layerpush.transport.base import TransportError
from layerpush.wire import (
    Registration,
    WireError,
    decode_registration,
    encode_completion,
    is_registration,
    is_understood,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.layerpush.worker")

T = TypeVar("T")

NOTIFICATION_POLL_S = 1e-3
SHUTDOWN_DRAIN_S = 2.0
SERVED_KEPT = 4096
COMPLAINT_S = 1.0


class LayerwisePushWorker(compat.WatchedPushWorker):
    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: LayerPushConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = config
        self._trace = TraceFile(config.trace_dir, engine_id, self.tp_rank)
        self._writer: PushWriter | None = None
        self._capture: Capture | None = None
        self._prepared = threading.Event()
        self._links: dict[str, Link] = {}
        self._served: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._receiver = Receiver(self.tracks)
        self._ledger = Ledger(compat.get_base_request_id)
        self._next_complaint = 0.0

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        layout, fallback = self._layout(kv_caches)
        config = self._config
        hooked = not compat.runs_in_microbatches(self.vllm_config)
        if not hooked and config.layerwise:
            logger.info("layerpush: steps run in microbatches, so layers are pushed at the end of each step")
        self._capture = Capture(layout.index_of, self._wake, fences_for(compat.device_of(kv_caches)), hooked=hooked)
        self._writer = PushWriter(
            Identity(self.engine_id, self.tp_rank, config.granularity if config.layerwise else "request", fallback),
            layout,
            Policy(
                by_layer=config.granularity == "layer",
                min_write_bytes=config.min_write_bytes,
                streams=config.layerwise and fallback is None,
            ),
            self.transport,
            self._capture,
            self,
            self._trace,
        )
        self._prepared.set()

    def _layout(self, kv_caches: dict[str, torch.Tensor]) -> tuple[CacheLayout, str | None]:
        """The cache by layer and why it cannot be used by layer, if it cannot."""
        reason = compat.worker_fallback(self)
        if reason is None:
            try:
                layout = compat.cache_layout(self, kv_caches)
            except LayoutError as error:
                reason = f"the KV cache cannot be told apart by layer: {error}"
            else:
                if self._config.layerwise:
                    logger.info("layerpush: %d layers, pushing by %s", len(layout.layers), self._config.granularity)
                return layout, None
        if self._config.layerwise:
            logger.warning("layerpush pushes whole requests from this engine: %s", reason)
        return CacheLayout((), ()), reason

    @property
    def writer(self) -> PushWriter:
        assert self._writer is not None, "register_kv_caches comes first"
        return self._writer

    # Main thread: hooks of a step.

    def arm(self, metadata: compat.LayerwiseMetadata) -> None:
        """A step begins: tell the writer before the first layer runs, and hand it what need not wait for the last."""
        if self._capture is None or (self.pcp_rank > 0 and not self.pcp_dcp_sharded):
            return
        if self._config.layerwise:
            for request in metadata.push_registrations.items():
                self._reg_send_inbox.put(request)
            for request_id, blocks in metadata.push_finished_blocks.items():
                self._capture.finish(request_id, blocks)
            metadata.push_registrations, metadata.push_finished_blocks = {}, {}
        self._capture.arm(metadata.step_plan, metadata.reqs_not_processed)
        self._wake()

    def revoke(self, metadata: compat.LayerwiseMetadata) -> None:
        """A step will take these requests' blocks away, and may overwrite them before ``arm``."""
        if self._capture is not None:
            self._capture.revoke(metadata.step_plan.preempted, metadata.reqs_not_processed)

    def _wake(self) -> None:
        if not self._push_writer_wake.is_set():
            self._push_writer_wake.set()

    def layer_saved(self, layer_name: str) -> None:
        if self._capture is not None:
            self._capture.layer_saved(layer_name)

    def sweep(self) -> None:
        if self._capture is not None:
            self._capture.sweep()

    def lease_expired(self, request_id: str) -> None:
        if self._capture is not None:
            self._capture.expire(request_id)

    def has_writes_in_flight(self, request_id: str) -> bool:
        return self.writer.writes_in_flight(request_id)

    # Writer thread: the loop.

    def _push_writer_loop(self) -> None:
        self._prepared.wait()
        self._guarded("using the device", None, self.use_device)
        while not self._push_writer_stop.is_set():
            self._push_writer_wake.clear()
            try:
                self._run_errands()
                self._drain_inboxes()
                self._drain_notifications()
                self.writer.turn()
            except Exception as error:  # the engine must outlive any defect here: every push fails, none completes
                logger.exception("layerpush: the writer's turn failed")
                self.writer.fail_all(f"{type(error).__name__}: {error}")
            self._push_writer_wake.wait(self._patience())

    def _patience(self) -> float | None:
        waits_for_peer = bool(self._push_finished_blocks or self._recving_metadata or self._receiver)
        own = self.writer.patience
        if not waits_for_peer:
            return own
        return NOTIFICATION_POLL_S if own is None else min(own, NOTIFICATION_POLL_S)

    def _run_errands(self) -> None:
        for errand in self.take_errands():
            self._guarded("an errand", None, errand)

    def _drain_inboxes(self) -> None:
        assert self._capture is not None
        for request_id in _drained(self._evict_finished_inbox):
            self._push_finished_blocks.pop(request_id, None)
            self._ledger.drop(request_id)
            self.writer.evicted(request_id)
            self.lease_settled(request_id)
        for request_id, data in _drained(self._reg_send_inbox):
            if not self._guarded("a registration", None, partial(self._send_registration_to_p, request_id, data)):
                self._failed_recv_reqs.put(request_id)
        for request_id, blocks, data in _drained(self._deferred_push_inbox):
            if request_id in self.writer:
                self._guarded("a deferred push", request_id, partial(self.push_whole, request_id, blocks, data))
        for request_id, blocks in _drained(self._finished_blocks_inbox):
            self._capture.finish(request_id, blocks)

    def _drain_notifications(self) -> None:
        for agent, payload in self._arrived():
            if not is_registration(payload) and not is_understood(payload):
                logger.error("layerpush drops a notification from agent %s that is none: %r", agent, payload[:64])
                continue
            if not is_registration(payload):
                self._receiver.accept(payload, time.perf_counter())
                continue
            try:
                registration = decode_registration(payload)
            except WireError as error:
                logger.error("layerpush drops a registration from agent %s: %s", agent, error)
                continue
            self._guarded("a registration", None, partial(self._registered, registration))
        for payload in self._receiver.due(time.perf_counter()):
            self._pending_completion_notifs.put(payload)

    def _arrived(self) -> list[tuple[str, bytes]]:
        try:
            return self.transport.notifications()
        except TransportError as error:
            now = time.perf_counter()
            if now >= self._next_complaint:
                self._next_complaint = now + COMPLAINT_S
                logger.error("layerpush cannot read NIXL notifications, and goes on trying: %s", error)
            return []

    def _guarded(self, what: str, request_id: str | None, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # upstream's code may raise anything; the push fails, the writer thread lives on
            logger.exception("layerpush: %s failed (request %s)", what, request_id)
            if request_id is not None:
                self.writer.fail(request_id, f"{type(error).__name__}: {error}")
            return False
        return True

    def _registered(self, registration: Registration) -> None:
        """Match a registration: a running prefill first, then a finished one, else keep it. Exact id, then base id.

        Every rank of a decode engine registers with every rank of ours; the first one counts for all of them.
        """
        if registration.key in self._served:
            return
        request_id = _match(registration.request_id, self.writer.waiting())
        if request_id is not None:
            self._serve(registration)
            self.writer.register(request_id, registration)
            return
        finished = self._pop_matching_finished_blocks(registration.request_id)
        if finished is not None:
            request_id, blocks = finished
            self._guarded("a push", request_id, partial(self.delegate, request_id, blocks, registration))
            return
        self._keep(registration)

    # Writer thread: what the writer asks of its host.

    def connect(self, request_id: str, registration: Registration) -> Link | None:
        engine_id = registration.decode_engine_id
        pending = self._ensure_handshake(
            engine_id, registration.decode_host, registration.decode_port, registration.decode_tp_size
        )
        if pending is not None:
            pending.add_done_callback(partial(self._handshake_over, request_id))
            return None
        self._engine_last_active[engine_id] = time.perf_counter()
        link = self._links.get(engine_id)
        if link is None:
            link = self._links[engine_id] = self.probe(engine_id)
            if link.refusal is not None:
                logger.warning("layerpush pushes whole requests to decode engine %s: %s", engine_id, link.refusal)
        return link

    def _handshake_over(self, request_id: str, future: Future[Any]) -> None:
        error = future.exception()
        self.errand(partial(self.writer.reconnect, request_id, None if error is None else str(error)))

    def take_registration(self, request_id: str) -> Registration | None:
        registration = self._ledger.take(request_id, time.perf_counter())
        if registration is not None:
            self._serve(registration)
        return registration

    def _serve(self, registration: Registration) -> None:
        """Remember, for a while, that this registration has its push: another copy of it must find no other one."""
        self._served[registration.key] = None
        while len(self._served) > SERVED_KEPT:
            self._served.popitem(last=False)

    def keep_registration(self, registration: Registration) -> None:
        self._served.pop(registration.key, None)
        self._keep(registration)

    def _keep(self, registration: Registration) -> None:
        for dropped in self._ledger.add(registration, time.perf_counter()):
            logger.warning("layerpush forgets the registration of %s: no such request came", dropped.request_id)

    def delegate(self, request_id: str, blocks: BlockIds, registration: Registration | None) -> None:
        registration = registration or self.take_registration(request_id)
        if registration is None:
            self._push_finished_blocks[request_id] = blocks
        else:
            self._serve(registration)
            self.push_whole(request_id, blocks, msgspec.to_builtins(registration))

    def delegated_write_ended(self, request_id: str, part: RankWrite, landed: bool) -> None:
        self.whole_write_ended(request_id, part, landed)

    def completion(self, registration: Registration) -> bytes:
        return encode_completion(registration.request_id, self.world_size)

    def release(self, request_id: str) -> None:
        self.report_sent(request_id)

    def whole_write_posted(self, request_id: str, part: RankWrite, decode_engine_id: str, decode_id: str) -> None:
        self.writer.adopt(request_id, part, decode_engine_id, decode_id)

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self._links.pop(engine_id, None)
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    def _engines_with_inflight_transfers(self) -> set[str]:
        receiving = list(self._recving_metadata.values())  # the main thread changes it meanwhile
        return self.writer.engines_in_use.union(meta.remote.engine_id for meta in receiving if meta.remote is not None)

    def shutdown(self) -> None:
        thread = getattr(self, "_push_writer_thread", None)
        if thread is not None:
            self._push_writer_stop.set()
            self._prepared.set()
            self._push_writer_wake.set()
            thread.join(timeout=SHUTDOWN_DRAIN_S)
            if self._writer is not None and not thread.is_alive():
                left = self._writer.drain(SHUTDOWN_DRAIN_S)
                if left:
                    logger.warning("layerpush shuts down with %d WRITEs still on the wire", left)
        if hasattr(self, "_trace"):
            self._trace.close()
        super().shutdown()


def _match(wanted: str, candidates: list[str]) -> str | None:
    """Upstream's rule: the exact id, else the same id without the engine's random suffix."""
    if wanted in candidates:
        return wanted
    base = compat.get_base_request_id(wanted)
    return next((candidate for candidate in candidates if compat.get_base_request_id(candidate) == base), None)


def _drained(inbox: queue.Queue[T]) -> Iterator[T]:
    while True:
        try:
            yield inbox.get_nowait()
        except queue.Empty:
            return
