"""``LayerwisePushWorker``: one rank's push worker. Builds P's and D's side, and runs the main thread's hooks of a step.

The hooks only append to queues; ``writer_thread`` documents them.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from layerpush.compat import module_hooks
from layerpush.compat.cache_layout import cache_layout, device_of, drafted_states
from layerpush.compat.engine_settings import (
    captured_tokens,
    microbatch,
    microbatches,
    only_decodes,
    worker_fallback,
)
from layerpush.compat.kv_parts import kv_parts
from layerpush.compat.metadata import (
    ABORTED,
    LayerwiseMetadata,
    LoadCancelled,
    LoadPostponed,
    Notice,
    PromptRefused,
    PushDeclined,
    RankIsOther,
    TraceHeaders,
)
from layerpush.compat.nixl_connector import get_base_request_id
from layerpush.compat.push_worker import VllmPushWorker
from layerpush.compat.spans import REQUEST_ID, emit_span
from layerpush.compat.worker_report import (
    AbortsPending,
    PushWithdrawn,
    Reported,
    TurnEnded,
    WorkerReport,
)
from layerpush.core.config import LayerPushConfig
from layerpush.core.layout import CacheLayout, LayoutError
from layerpush.core.liveness import PeerWatch, Verdict
from layerpush.core.request_names import Arrived
from layerpush.core.wire import Registration
from layerpush.decode.checks import Checks
from layerpush.decode.loads import Loads
from layerpush.decode.outcomes import Outcomes
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.engine.metric_sources import watch_pushes, watch_rings, watch_worker
from layerpush.engine.unreported_aborts import UnreportedAborts
from layerpush.engine.worker.gathering import WorkerGathering
from layerpush.engine.worker.inbox import Inbox
from layerpush.engine.worker.side_channel_probe import Prober
from layerpush.engine.worker.wake import Waker
from layerpush.engine.worker.writer_thread import DRAIN_S, WriterThread
from layerpush.prefill.claims import Claims
from layerpush.prefill.fences import fences_for
from layerpush.prefill.links import Links
from layerpush.prefill.push import Identity
from layerpush.prefill.pushes import Pushes
from layerpush.prefill.samples import Sampler
from layerpush.prefill.step_events import StepEvents
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.reporter import Reporter
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.telemetry.spans import SpannedTrace, Spans
from layerpush.transport import cuda
from layerpush.transport.base import TransportError
from layerpush.transport.connections import Connections
from layerpush.transport.idle_connections import PING_EVERY_S, IdleConnections
from layerpush.transport.kv_parts import CHECKSUM
from layerpush.transport.link import Link
from layerpush.transport.peers import Address, Rank
from layerpush.transport.transfer import Transfer
from layerpush.transport.writes import Writes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from layerpush.telemetry.metrics.metric_delta import MetricDelta

logger = logging.getLogger(f"vllm.{__name__}")


class LayerwisePushWorker(VllmPushWorker):
    """vLLM calls ``register_kv_caches`` before the first step. Only ``shutdown`` may be called without it."""

    step_events: StepEvents
    links: Links
    pushes: Pushes
    claims: Claims
    loads: Loads
    _writer_thread: WriterThread | None = None

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: LayerPushConfig
    ) -> None:
        self._rank = vllm_config.parallel_config.rank
        self.metrics = Reporter(str(self._rank))
        self._waker = Waker(self.metrics.lag.woken)
        super().__init__(vllm_config, engine_id, kv_cache_config, self._waker)
        self._config = config
        self._reported: deque[Reported] = deque()
        self._unreported_aborts, self._settles = UnreportedAborts(), False
        self._prober = Prober(self.threads)
        self._spans = Spans(emit_span, REQUEST_ID)
        self._trace = SpannedTrace(config.trace_dir, engine_id, self.tp_rank, self._spans)
        self._gathering = WorkerGathering(self, config)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Builds everything that the hooks and the writer thread use, and starts the writer's loop. Main thread."""
        self._gathering.allocate(device_of(kv_caches))
        super().register_kv_caches(kv_caches)
        layout, fallback = self._layout(kv_caches)
        if fallback is None:
            self._gathering.build(layout, kv_caches)
        self._writer_thread = self._build(layout, fallback, kv_caches)
        if fallback is None and not only_decodes(self.vllm_config):
            module_hooks.watch(self.vllm_config, self.step_events.layer_saved)
        self.start_writer(self._writer_thread.run)

    def _layout(self, kv_caches: dict[str, torch.Tensor]) -> tuple[CacheLayout, str | None]:
        """The layout of the cache, and the reason if the cache cannot be used by layer."""
        reason = worker_fallback(self)
        if reason is None:
            try:
                layout = self.layout = cache_layout(self, kv_caches)
            except LayoutError as error:
                reason = f"the KV cache cannot be told apart by layer: {error}"
            else:
                if self._config.layerwise:
                    logger.info("layerpush: %d layers, granularity %s", len(layout.layers), self._config.granularity)
                return layout, None
        if self._config.layerwise:
            logger.warning("layerpush pushes whole requests from this engine: %s", reason)
        return CacheLayout((), ()), reason

    def _build(self, layout: CacheLayout, fallback: str | None, kv_caches: dict[str, torch.Tensor]) -> WriterThread:
        config, gathering, peer_errors = self._config, self._gathering, PeerErrors(logger)
        device = device_of(kv_caches)
        self.step_events = StepEvents(
            layout.index_of,
            self._waker.wake,
            fences_for(device),
            wake_lazily=self._waker.wake_lazily,
            microbatches=microbatches(self.vllm_config),
            microbatch=microbatch,
            drafted=module_hooks.drafted(self.vllm_config, kv_caches) | drafted_states(self),
        )
        parts = kv_parts(self, layout) if fallback is None and config.verify else None
        self._verifies = None if parts is None else CHECKSUM
        self._connections = Connections(self, self.transport, config.allowed_hosts, self._search, self._probe_peer)
        self.links = Links(self, self._connections)
        self.pushes = Pushes(
            self._identity(fallback),
            config.mode,
            Writes(self.transport, layout, gathering.strategy, config.write_timeout_s),
            self.step_events,
            self.links,
            self._trace,
            PushMeter(self.metrics.recorder, engine_fallback=fallback),
            None if parts is None else Sampler(parts, [layer.name for layer in layout.layers], config.verify),
        )
        self.claims = Claims(
            self.pushes,
            self._connections,
            self._probe_peer,
            peer_errors,
            get_base_request_id,
            lambda: self.step_events.steps,
            config.unknown_request_timeout_s,
            self._withdrawn if config.answer_early else lambda _: None,
        )
        self.pushes.registry = self.claims
        self._cuda = cuda.runtime(device)
        self._contact = self._own_contact()
        recorder, watch = self.metrics.recorder, PeerWatch(config.peer_timeout_s)
        self.loads = Loads(
            self,
            config.peer_timeout_s,
            PrefillPeers(self, self._connections, watch, self._probe_peer, recorder),
            Outcomes(self, self._rank, self._reported.append, self._trace, recorder),
            peer_errors,
            None if parts is None else Checks(parts, recorder),
        )
        idle = IdleConnections(
            self.engine_id,
            self._connections,
            self._probe_peer,
            lambda: self.engines_in_use,
            partial(random.uniform, 0.0, PING_EVERY_S),
        )
        inbox = Inbox(
            self.transport,
            self.claims,
            self.loads,
            idle,
            self.heartbeat,
            peer_errors,
            cuda.rdma_flush(self._cuda, device),
        )
        watch_worker(self.metrics, self.vllm_config.parallel_config.world_size, self.loads, peer_errors)
        watch_pushes(self.metrics, self.pushes, self.claims, self.step_events, self._trace)
        watch_rings(self.metrics, gathering.rings)
        return WriterThread(
            self,
            self._waker,
            self.metrics.lag,
            inbox,
            self.pushes,
            self.loads,
            (self._connections, self.claims, self.loads, idle),
            self._unreported_aborts,
        )

    def _own_contact(self) -> bytes | None:
        """The address of this agent for peers without a handshake. None: they report a failure to nobody."""
        try:
            return self.transport.contact()
        except TransportError as error:
            logger.warning("layerpush: a prefill engine whose handshake fails cannot report it here: %s", error)
            return None

    def _identity(self, fallback: str | None) -> Identity:
        model, captured = self.vllm_config.model_config.model, captured_tokens(self.vllm_config)
        return Identity(self.engine_id, self.tp_rank, fallback, model, captured)

    def shutdown(self) -> None:
        """Stop the writer, then vLLM's worker, and NIXL with it. Also after an initialiser that failed. Main thread."""
        if hasattr(self, "threads"):
            self.threads.close()
        thread, self._writer_thread = self._writer_thread, None
        stopped = self.join_writer(DRAIN_S) if thread is None else thread.stop()
        if stopped and hasattr(self, "_gathering"):
            self._gathering.close()
        for part in ("_prober", "_trace"):
            if hasattr(self, part):
                getattr(self, part).close()
        super().shutdown()

    # Main thread: hooks of a step. ``step_events`` has those for a layer and for the end of the forward pass.

    def arm(self, metadata: LayerwiseMetadata) -> None:
        """A step begins: queue its registrations, news, finished requests and plan, and wake the writer.

        Raises ``EngineThreadError`` if a thread of this worker has ended.
        """
        self.threads.check()
        if self.has_copies:
            self.count_as_sent(metadata)
            return
        for request_id, data in metadata.push_registrations.items():
            self.task(partial(self._await_push, request_id, data), "a registration")
        for news in metadata.news:
            if isinstance(news, Arrived):
                if news.prefixes is not None:
                    self.turns.add(news.request_id)
                self.claims.requests_arrived([news])  # the writer must have it before the request's first step
            else:
                self.task(partial(self._take_news, news), type(news).__name__)
        for request_id, blocks in metadata.push_finished_blocks.items():
            self.step_events.finish(
                request_id,
                blocks,
                metadata.sampled.get(request_id),
                metadata.prompt_tokens.get(request_id, 0),
                is_turn=request_id in self.turns,
            )
        metadata.push_registrations, metadata.push_finished_blocks = {}, {}
        self.claims.short_of_blocks = metadata.short_of_blocks
        self.step_events.arm(metadata.step_plan, metadata.reqs_not_processed)
        if metadata.reqs_not_processed:
            self._unreported_aborts.abort_began(time.perf_counter())
        self._waker.wake()

    def revoke(self, metadata: LayerwiseMetadata) -> None:
        """A step will take these requests' blocks away, and may overwrite them before ``arm``."""
        plan = metadata.step_plan
        self.step_events.revoke(plan.preempted, metadata.reqs_not_processed, plan.rewound)

    def lease_expired(self, request_id: str) -> None:
        """The lease of a finished request is over. Comes before its blocks are freed."""
        self.step_events.expire(request_id)
        self._unreported_aborts.abort_began(time.perf_counter())
        self._waker.wake()

    def has_writes_in_flight(self, request_id: str) -> bool:
        """Whether a WRITE reads from the request's blocks: its lease must not end then."""
        return self.pushes.writes_in_flight(request_id)

    def may_lapse(self, request_id: str) -> bool:
        return self.claims.may_lapse(request_id)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """vLLM's, without the ends of kept turns: vLLM's scheduler does not know these requests any more."""
        results = super().get_transfer_results()
        ended = self.turns & results.finished_sending
        self.turns -= ended
        results.finished_sending -= ended
        self._reported.extend(TurnEnded(request_id, self._rank) for request_id in ended)
        return results

    def take_metrics(self, now: float) -> MetricDelta | None:
        """Metrics since the last call. vLLM calls ``report`` next."""
        # Asked first: if no abort is pending, these metrics and the report have the outcomes of all.
        self._settles = self._unreported_aborts.is_pending(now)
        return self.metrics.take_delta(now)

    def report(self) -> WorkerReport | None:
        """Loads that were completed, parked or cleared since the last report, their first tokens, ended pushes and
        loads, and whether pushes of aborted requests still run.
        """
        news: list[Reported] = [*self.metrics.recorder.take_ended()]
        news += (self._reported.popleft() for _ in range(len(self._reported)))
        if self._settles:
            news.append(AbortsPending())
        return WorkerReport(news) if news else None

    # Any thread.

    @property
    def engines_in_use(self) -> set[str]:
        """Engines whose connections must stay: pushes or loads need them."""
        return self.pushes.engines_in_use | self.loads.engines_in_use

    # Writer thread: its loop.

    def use_device(self) -> None:
        super().use_device()
        cuda.allow_captures(self._cuda)

    # Writer thread: news of the scheduler.

    def _take_news(self, news: Notice) -> None:
        now = time.perf_counter()
        match news:
            case RankIsOther():
                self.claims.rank_is_other(news.request_id, news.rank, now)
            case PromptRefused():
                self.claims.request_refused(news.request_id, news.transfer_id, now)
            case PushDeclined():
                self.loads.decline(news.address, news.message)
            case LoadCancelled() if news.reason == ABORTED:
                self.loads.abort(news.request_id, news.reason, now)
            case LoadCancelled():
                self.loads.time_out(news.request_id, news.reason, now)
            case LoadPostponed():
                self.loads.unregister(news.request_id, now)
            case TraceHeaders():
                self._spans.expect(news.request_id, news.headers)
            case _:
                assert_never(news)

    # Writer thread: P's side.

    def discover_link(self, engine_id: str) -> Link:
        return self._gathering.with_gathering(super().discover_link(engine_id))

    def whole_write_posted(self, request_id: str, transfer: Transfer, decode_engine_id: str, decode_id: str) -> None:
        """vLLM has posted a WRITE of a whole request: its push watches it."""
        self.pushes.adopt(request_id, transfer, decode_engine_id, decode_id)

    # Writer thread: D's side.

    def _await_push(self, request_id: str, data: dict[str, Any]) -> None:
        """Register with P for a request that the scheduler has just allocated blocks for."""
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
                notify_only=data.get("remote_pp_size", 1) > 1
                or (only_decodes(self.vllm_config) and not self._config.bidirectional_kv_xfer),
                has_stages=True,
            )
            extra = {key: value for key, value in data.items() if key.startswith("remote_")}
            if self._contact is not None:
                extra["contact"] = self._contact
            if self.acknowledges:
                extra["acknowledges"] = True
            if self._verifies is not None:
                extra["verifies"] = self._verifies
            self.loads.register(registration, address, extra, now)
        except Exception as error:  # noqa: BLE001  whatever it is: no load would report the request's end
            self.loads.refuse(request_id, f"it cannot be registered: {error}", now)

    def _withdrawn(self, request_id: str) -> None:
        self._reported.append(PushWithdrawn(request_id))

    # Writer thread: engines that may be gone.

    def _probe_peer(
        self, agent: str, rank: Rank, address: Address, on_verdict: Callable[[Verdict, float], None]
    ) -> None:
        """Have the prober ask the engine's side channel about its agent. The verdict comes back as a task."""
        pp_rank, tp_rank = rank

        def asked(verdict: Verdict) -> None:
            self.task(lambda: on_verdict(verdict, time.perf_counter()))

        self._prober.start(address.host, address.port, agent, tp_rank, asked, pp_rank, address.engine_id)

    def _search(self, address: Address, on_contact: Callable[[bytes], None]) -> None:
        """Have the prober ask the engine's side channel for the contacts of its ranks. Each comes back as a task."""

        def found(contact: bytes) -> None:
            self.task(partial(on_contact, contact))

        for pp_rank, tp_rank in product(range(address.pp_size), range(address.tp_size)):
            self._prober.search(address.host, address.port, tp_rank, found, pp_rank)

    def end_pushes(self, engine_id: str, reason: str) -> bool:
        """Fail the pushes to an engine. Returns whether no WRITE is on its way to it."""
        self.pushes.fail_engine(engine_id, reason)
        return not self.has_writes_to(engine_id)

    def has_writes_to(self, engine_id: str) -> bool:
        """Whether a WRITE is on its way to an engine of this id."""
        return engine_id in self.pushes.engines_in_flight
