"""``LayerwisePushWorker``: vLLM's push worker, with a writer that pushes layers during prefill, and desks for peers.

Three kinds of thread meet here. The engine's main thread runs the hooks of a step and only appends to queues. The
writer thread (upstream's ``nixl-push-writer``) runs everything else. The handshake executor and the prober finish
work that the writer started and hand it back as errands.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from vllm.logger import init_logger

from layerpush.compat.facts import cache_layout, device_of, only_decodes, runs_in_microbatches, worker_fallback
from layerpush.compat.metadata import LayerwiseMetadata
from layerpush.compat.nixl_connector import get_base_request_id
from layerpush.compat.push_worker import VllmPushWorker
from layerpush.compat.spans import REQUEST_ID, emit_span
from layerpush.core.config import LayerPushConfig
from layerpush.core.coverage import MismatchError
from layerpush.core.layout import CacheLayout, LayoutError
from layerpush.core.liveness import PeerWatch
from layerpush.core.push_policy import Policy
from layerpush.core.unreported_aborts import UnreportedAborts
from layerpush.core.wire import Registration, Window, WireError
from layerpush.decode.loads import Loads
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.decode.report import ABORTED, DecodeReport
from layerpush.decode.unpacking import NoUnpacking
from layerpush.prefill.fences import fences_for
from layerpush.prefill.host import Identity
from layerpush.prefill.registrations import Registrations
from layerpush.prefill.step_events import StepEvents
from layerpush.prefill.writer import PushWriter
from layerpush.telemetry.metrics.loads import LoadMeter
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.reporter import Reporter
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.telemetry.spans import SpannedTrace, Spans
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.base import Route, TransportError
from layerpush.transport.connections import Address, Connections, Rank
from layerpush.transport.link import Link
from layerpush.transport.writes import Transfer
from layerpush.worker.dispatch import Dispatcher
from layerpush.worker.metric_sources import watch_rings, watch_worker, watch_writer
from layerpush.worker.packing import WorkerPacking
from layerpush.worker.prefill_host import WorkerHost
from layerpush.worker.side_channel_probe import Prober
from layerpush.worker.thread_name import WRITER, name_this_thread
from layerpush.worker.wake import Waker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from layerpush.telemetry.metrics.tally import Tally

logger = init_logger("vllm.layerpush.worker")

T = TypeVar("T")

NOTIFICATION_POLL_S = 1e-3
IDLE_POLL_S = 50e-3
SHUTDOWN_DRAIN_S = 2.0
DIGESTS_KEPT = 1 << 16


class LayerwisePushWorker(VllmPushWorker):
    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: LayerPushConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = config
        self._spans = Spans(emit_span, REQUEST_ID)
        self._trace = SpannedTrace(config.trace_dir, engine_id, self.tp_rank, self._spans)
        self._writer: PushWriter | None = None
        self._step_events: StepEvents | None = None
        self._prepared = threading.Event()
        self._push_writer_wake = Waker()  # before vLLM starts the thread
        self._digests: dict[str, str] = {}
        self._reports: deque[tuple[str, str]] = deque()
        self._peer_errors = PeerErrors(logger)
        self.metrics = Reporter(str(vllm_config.parallel_config.rank))
        self._unreported_aborts, self._settles = UnreportedAborts(), False
        self._prober = Prober()
        self._staging = WorkerPacking(self, config)
        self._connections = Connections(self, self.transport, config.allowed_hosts)
        self._host = WorkerHost(self, self._connections, self._guarded, self._peer_lost)
        self._loads: Loads | None = None
        self._registrations: Registrations | None = None
        self._dispatcher: Dispatcher | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._staging.allocate(device_of(kv_caches))
        super().register_kv_caches(kv_caches)
        layout, fallback = self._layout(kv_caches)
        config = self._config
        if fallback is None:
            self._staging.build(layout, kv_caches)
            self._host.layout = layout if self._staging.strategy is not None else None
        hooked = not runs_in_microbatches(self.vllm_config)
        if not hooked and config.layerwise:
            logger.info("layerpush: steps run in microbatches, so layers are pushed at the end of each step")
        fences = fences_for(device_of(kv_caches))
        self._step_events = StepEvents(layout.index_of, self._wake, fences, nudge=self._nudge, hooked=hooked)
        self._writer = PushWriter(
            Identity(self.engine_id, self.tp_rank, config.mode, fallback),
            layout,
            Policy(
                by_layer=config.granularity == "layer",
                min_write_bytes=config.min_write_bytes,
                streams=config.layerwise and fallback is None,
            ),
            self.transport,
            self._step_events,
            self._host,
            self._trace,
            config.write_timeout_s,
            PushMeter(self.metrics.recorder, engine_fallback=fallback),
            self._staging.strategy,
        )
        self._registrations = Registrations(
            self._writer,
            self._connections,
            self._probe_peer,
            self._peer_errors,
            get_base_request_id,
            self._digests,
        )
        meter = LoadMeter(self.metrics.recorder)
        watch = PeerWatch(config.peer_timeout_s)
        self._loads = Loads(
            self.engine_id,
            self.world_size,
            config.peer_timeout_s,
            PrefillPeers(self.engine_id, self._connections, watch, self._probe_peer, self, meter),
            self,
            self._staging.unpacker or NoUnpacking(),
            self._peer_errors,
            meter,
        )
        self._dispatcher = Dispatcher(
            self.transport,
            self._registrations,
            self._loads,
            self._staging.unpacked,
            self._pending_completion_notifs.put,
            self._peer_errors,
        )
        watch_worker(self.metrics, self.vllm_config.parallel_config.world_size, self._loads, self._peer_errors)
        watch_writer(self.metrics, self._writer, self._registrations, self._step_events, self._trace)
        watch_rings(self.metrics, self._staging.rings)
        self._connections.on_lost = self._peer_lost
        self._host.desk = self._registrations
        self._prepared.set()

    def _layout(self, kv_caches: dict[str, torch.Tensor]) -> tuple[CacheLayout, str | None]:
        """The cache by layer and why it cannot be used by layer, if it cannot."""
        reason = worker_fallback(self)
        if reason is None:
            try:
                layout = cache_layout(self, kv_caches)
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

    @property
    def registrations(self) -> Registrations:
        assert self._registrations is not None, "register_kv_caches comes first"
        return self._registrations

    @property
    def loads(self) -> Loads:
        assert self._loads is not None, "register_kv_caches comes first"
        return self._loads

    @property
    def dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "register_kv_caches comes first"
        return self._dispatcher

    # Main thread: hooks of a step.

    def arm(self, metadata: LayerwiseMetadata) -> None:
        """A step begins: tell the writer before the first layer runs, and hand it what need not wait for the last."""
        if self._step_events is None or (self.pcp_rank > 0 and not self.pcp_dcp_sharded):
            return
        self._digests.update(metadata.prompt_digests)
        with contextlib.suppress(RuntimeError):  # the writer removed one meanwhile: then there is a next time
            while len(self._digests) > DIGESTS_KEPT:
                self._digests.pop(next(iter(self._digests)), None)
        self._spans.expect(metadata.trace_headers)
        for request in metadata.push_registrations.items():
            self._reg_send_inbox.put(request)
        for request_id, blocks in metadata.push_finished_blocks.items():
            self._step_events.finish(request_id, blocks)
        metadata.push_registrations, metadata.push_finished_blocks = {}, {}
        if metadata.cancelled:
            self.task(partial(self._cancel_loads, dict(metadata.cancelled)))
        self._step_events.arm(metadata.step_plan, metadata.reqs_not_processed)
        if metadata.reqs_not_processed:
            self._unreported_aborts.dropped(time.perf_counter())
        self._wake()

    def revoke(self, metadata: LayerwiseMetadata) -> None:
        """A step will take these requests' blocks away, and may overwrite them before ``arm``."""
        if self._step_events is not None:
            self._step_events.revoke(metadata.step_plan.preempted, metadata.reqs_not_processed)

    def measured(self, now: float) -> Tally | None:
        """What is new for the metrics. Before ``report``: what it keeps the engine stepping for is told by then."""
        self._settles = self._unreported_aborts.is_pending(now)
        return self.metrics.take(now)

    def report(self) -> DecodeReport | None:
        """Loads that were given up while somebody may still write, and such as are over now, since the last report;
        whether dropped requests' pushes are not over.
        """
        if not self._reports and not self._settles:
            return None
        report, rank = DecodeReport(settling=self._settles), int(self.vllm_config.parallel_config.rank)
        while self._reports:
            kind, request_id = self._reports.popleft()
            (report.parked if kind == "parked" else report.cleared)[request_id] = {rank}
        return report

    def _wake(self) -> None:
        if not self._push_writer_wake.is_set():
            self.metrics.lag.woken(time.perf_counter())
            self._push_writer_wake.set()

    def _nudge(self) -> None:
        if not self._push_writer_wake.naps:
            self._wake()

    def layer_saved(self, layer_name: str) -> None:
        if self._step_events is not None:
            self._step_events.layer_saved(layer_name)

    def sweep(self) -> None:
        if self._step_events is not None:
            self._step_events.sweep()

    def lease_expired(self, request_id: str) -> None:
        if self._step_events is not None:
            self._step_events.expire(request_id)
            self._unreported_aborts.dropped(time.perf_counter())
            self._wake()

    def has_writes_in_flight(self, request_id: str) -> bool:
        return self.writer.writes_in_flight(request_id)

    # Writer thread: the loop.

    def _push_writer_loop(self) -> None:
        name_this_thread(WRITER)
        self._cores.bind_writer()
        self._prepared.wait()
        self._guarded("using the device", None, self.use_device)
        while not self._push_writer_stop.is_set():
            self._push_writer_wake.clear()
            self.metrics.lag.began(time.perf_counter())
            try:
                self._turn()
            except Exception as error:  # the engine must outlive any defect here: every push fails, none completes
                logger.exception("layerpush: the writer's turn failed")
                self.writer.fail_all(f"{type(error).__name__}: {error}")
            patience = self._patience()
            self.metrics.lag.ended(time.perf_counter(), patience)
            self._push_writer_wake.wait(patience, naps=self.writer.keeps_pace(patience))

    def _turn(self) -> None:
        dropped = self._unreported_aborts.count
        for task in self.take_errands():
            self._guarded("an errand", None, task)
        self._drain_inboxes()
        self.dispatcher.deliver()
        self.writer.turn()
        now = time.perf_counter()
        self._connections.tick(now)
        self.registrations.tick(now)
        self.loads.tick(now)
        if not self.writer.is_draining:
            self._unreported_aborts.settled(dropped)

    def _patience(self) -> float:
        own = self.writer.patience
        peers = NOTIFICATION_POLL_S if self.loads.is_waiting else IDLE_POLL_S
        return peers if own is None else min(own, peers)

    def _drain_inboxes(self) -> None:
        assert self._step_events is not None
        for request_id in _drained(self._evict_finished_inbox):
            self.writer.evicted(request_id)
            self.lease_settled(request_id)
        for request_id, data in _drained(self._reg_send_inbox):
            self._guarded("a registration", None, partial(self._await_push, request_id, data))
        for request_id, blocks, data in _drained(self._deferred_push_inbox):
            if self.writer.is_delegated(request_id):
                self._guarded("a deferred push", request_id, partial(self.push_whole, request_id, blocks, data))
        for request_id, blocks in _drained(self._finished_blocks_inbox):
            self._step_events.finish(request_id, blocks)

    def _guarded(self, what: str, request_id: str | None, call: Callable[[], None]) -> bool:
        try:
            call()
        except (MismatchError, TransportError) as error:
            if request_id is None:
                logger.exception("layerpush: %s failed", what)
            else:
                self.writer.fail(request_id, str(error))
            return False
        except Exception as error:  # upstream's code may raise anything; the push fails, the writer thread lives on
            logger.exception("layerpush: %s failed (request %s)", what, request_id)
            if request_id is not None:
                self.writer.fail(request_id, f"{type(error).__name__}: {error}")
            return False
        return True

    # Writer thread: a decode engine's side.

    def _await_push(self, request_id: str, data: dict[str, Any]) -> None:
        now = time.perf_counter()
        try:
            registration = msgspec.convert(data, Registration)
            address = Address(
                data["remote_engine_id"],
                data["remote_host"],
                data["remote_port"],
                data["remote_tp_size"],
                data.get("remote_pp_size", 1),
                # a stage of a pipeline has too few layers for us to write to it, and vLLM then refuses the handshake
                notify_only=only_decodes(self.vllm_config) or data.get("remote_pp_size", 1) > 1,
            )
            extra = {key: value for key, value in data.items() if key.startswith("remote_")}
            self.loads.register(registration, address, extra, now)
        except (msgspec.ValidationError, WireError, LookupError) as error:
            self.loads.refuse(request_id, f"it cannot be registered: {error}", now)

    def _cancel_loads(self, cancelled: dict[str, str]) -> None:
        self._drain_inboxes()  # a registration and its end may come in one step
        now = time.perf_counter()
        for request_id, reason in cancelled.items():
            if reason == ABORTED:
                self.loads.abort(request_id, reason, now)
            else:
                self.loads.time_out(request_id, reason, now)

    def parked(self, request_id: str) -> None:
        self._reports.append(("parked", request_id))

    def cleared(self, request_id: str) -> None:
        self._reports.append(("cleared", request_id))

    def keep_load(self, record: LoadRecord) -> None:
        record.rank = self.tp_rank
        if record.prefill_engine_id is not None:
            record.clock_offset = self.clock_offset(record.prefill_engine_id)
        self._trace.add(record)

    def forget_prefill_engine(self, engine_id: str) -> bool:
        self.writer.fail_engine(engine_id, "the connection to the decode engine was dropped")  # it may be both
        if engine_id in self.writer.engines_in_flight:
            self.registrations.peers.lost(engine_id)
            return False
        self._connections.forget(engine_id)
        return True

    def _probe_peer(self, agent: str, rank: Rank, address: Address, on_verdict: Callable[[Any, float], None]) -> None:
        """Have somebody ask the engine's side channel about its agent; the answer comes back to the writer thread."""
        pp_rank, tp_rank = rank

        def asked(_: Any, verdict: Any) -> None:
            self.task(lambda: on_verdict(verdict, time.perf_counter()))

        self._prober.start((address.engine_id, agent), address.host, address.port, agent, tp_rank, asked, pp_rank)

    def _peer_lost(self, engine_id: str) -> None:
        self.loads.peers.connection_lost(self.agents_of(engine_id), time.perf_counter())
        self.registrations.peers.lost(engine_id)

    def link_to(self, engine_id: str) -> Link:
        return self._staging.with_gathering(self.probe(engine_id))

    def ring_of(self, link: Link, window: Window) -> Route | None:
        return self._staging.ring_of(link.engine_id, link.routes[0].agent, window)

    def whole_write_posted(self, request_id: str, transfer: Transfer, decode_engine_id: str, decode_id: str) -> None:
        self.writer.adopt(request_id, transfer, decode_engine_id, decode_id)

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self._host.disconnected(engine_id)
        self._staging.disconnected(engine_id)
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    def _engines_with_inflight_transfers(self) -> set[str]:
        return self.writer.engines_in_use | self._staging.engines_in_flight | self.loads.engines_in_use

    def shutdown(self) -> None:
        thread = getattr(self, "_push_writer_thread", None)
        if thread is not None:
            self._push_writer_stop.set()
            self._prepared.set()
            self._push_writer_wake.set()
            thread.join(timeout=SHUTDOWN_DRAIN_S)
            if self._writer is not None and not thread.is_alive():
                self._writer.fail_all("the prefill engine shuts down")
                left = self._writer.drain(SHUTDOWN_DRAIN_S, self.dispatcher.deliver_answers)
                if left:
                    logger.warning("layerpush shuts down with %d WRITEs still on the wire", left)
        if hasattr(self, "_staging") and (thread is None or not thread.is_alive()):
            self._staging.close()
        if hasattr(self, "_prober"):
            self._prober.close()
        if hasattr(self, "_trace"):
            self._trace.close()
        super().shutdown()


def _drained(inbox: queue.Queue[T]) -> Iterator[T]:
    while True:
        try:
            yield inbox.get_nowait()
        except queue.Empty:
            return
