"""``LayerwisePushScheduler``: plans P's pushes of each step and awaits D's. One class, for an engine may be both."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from layerpush.compat import early_answer, first_tokens, patches
from layerpush.compat.engine_settings import engine_fallback
from layerpush.compat.engine_threads import EngineThreads
from layerpush.compat.first_tokens import FirstTokens
from layerpush.compat.kinds import CacheKinds
from layerpush.compat.metadata import (
    LayerwiseMetadata,
    LoadCancelled,
    LoadPostponed,
    News,
    PromptRefused,
    PushDeclined,
    RankIsOther,
    TraceHeaders,
)
from layerpush.compat.nixl_connector import NixlConnectorMetadata
from layerpush.compat.push_scheduler import (
    StagedRegistration,
    VllmPushScheduler,
    has_answer,
    lacks_registration,
    name_prefill_request,
)
from layerpush.compat.spans import traces_requests
from layerpush.compat.worker_report import AbortsPending, PushWithdrawn, Reported, TurnEnded, WorkerReport
from layerpush.core.config import LayerPushConfig
from layerpush.core.first_token import Sampled
from layerpush.core.load_news import (
    LoadCleared,
    LoadCompleted,
    LoadKept,
    LoadParked,
    LoadQueued,
    LoadToken,
    LoadUnregistered,
    RequestNews,
)
from layerpush.core.prefixes import LEAST_STRIDE, SHOWN_CHARS
from layerpush.core.push_mode import PushMode
from layerpush.core.request_names import Arrived, is_one_of_several
from layerpush.core.request_params import PREFIXES, ParamsError, chosen_mode, is_pushed, is_returned, transfer_id
from layerpush.core.step_plan import PromptProgress, StepPlan
from layerpush.core.wire import PROTOCOL_VERSION, Decline
from layerpush.engine.metric_sources import watch_peer_errors
from layerpush.engine.scheduler import turn_protocol as turn
from layerpush.engine.scheduler.awaited_pushes import AwaitedPushes
from layerpush.engine.scheduler.hand_overs import HandOvers
from layerpush.engine.scheduler.last_window import LastWindows
from layerpush.engine.scheduler.places import Places
from layerpush.engine.scheduler.postponed_loads import PostponedLoads
from layerpush.engine.scheduler.prefix_hits import PrefixHits, Tables
from layerpush.engine.scheduler.provisional_steps import ProvisionalSteps
from layerpush.engine.scheduler.request_filter import RequestFilter
from layerpush.engine.scheduler.side_channel import listen
from layerpush.engine.scheduler.turns import Turns
from layerpush.engine.unreported_aborts import NEXT_REPORT_S
from layerpush.telemetry.metrics.catalog import (
    DROPPED_RECORDS,
    EARLY_ANSWERS,
    FIRST_TOKENS,
    KEPT_TOKENS,
    PARKED_BLOCKS,
    PARKED_REQUESTS,
    WAITING_PROMPTS,
)
from layerpush.telemetry.metrics.ended_counts import EndedCounts
from layerpush.telemetry.metrics.recorder import Ended
from layerpush.telemetry.metrics.reporter import Reporter
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import SCHEDULER_RANK
from layerpush.transport.peers import Address
from layerpush.transport.port import bind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from layerpush.telemetry.metrics.metric_delta import MetricDelta

RETURN_S = 30.0
"""Seconds for which P waits for a turn. Then it computes the prompt."""

logger = logging.getLogger(f"vllm.{__name__}")


class LayerwisePushScheduler(VllmPushScheduler):
    """Adds to vLLM's push scheduler a plan of every step for the workers, and deadlines for the pushes that D awaits.

    Every method runs in the scheduler's thread. ``bind`` comes before the first request.
    """

    awaited: AwaitedPushes
    places: Places
    last_windows: LastWindows
    postponed: PostponedLoads
    first_tokens: FirstTokens | None
    """None: the requests of this engine compute their first tokens themselves."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: LayerPushConfig
    ) -> None:
        patches.install(patches.Process.ENGINE_CORE)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = config
        self._threads = EngineThreads()
        self._kinds = CacheKinds(kv_cache_config)
        self._requests: dict[str, Request] = {}
        """Requests that vLLM has not finished. Ranks may still send news of others: see ``_reported``."""
        self._prompts: dict[str, tuple[Request, PromptProgress]] = {}
        self._dropped: dict[str, tuple[Request, list[range]]] = {}
        """P's requests whose last token needs blocks that vLLM drops, and the indices of those blocks in each group."""
        self._prefix_hits = PrefixHits(self._kinds.transferred)
        self._provisional_steps = ProvisionalSteps(self._kinds.transferred, vllm_config.max_concurrent_batches)
        self._token_may_be_stale = vllm_config.max_concurrent_batches > 1
        """After a rewind, vLLM may give a request the token of a step that it has taken back."""
        self._digests: dict[str, str | None] = {}
        """By request id: a long prompt is digested once."""
        self._sampled: dict[str, Sampled] = {}
        self._prompt_tokens: dict[str, int] = {}
        self._news: list[News] = []
        self._traces_requests = traces_requests(vllm_config)
        self._unplaced: dict[str, Request] = {}
        """Requests that vLLM has looked at in this step, and that have no blocks yet."""
        self._loading: dict[str, tuple[Request, int]] = {}
        """Requests whose load is not over, finished ones among them, each with its prefix-cache hit in tokens."""
        self._kept: dict[str, int] = {}
        """By request id: the least of the prompt's first tokens whose KV stays, of the ranks whose load has failed."""
        self._numbers = itertools.count(1)
        self._attempts: dict[str, int] = {}
        self._answered: set[str] = set()
        """P's requests that the front end has answered early."""
        self._withdrawn: set[str] = set()
        self._answers_early = config.answer_early and patches.is_on("early-answers")
        self._workers_settle_until, self._step_is_due = 0.0, False
        assert vllm_config.kv_transfer_config is not None
        self._request_filter = RequestFilter(vllm_config.kv_transfer_config.kv_role, config)
        self.metrics = Reporter("scheduler")
        watch_peer_errors(self.metrics, self._request_filter.peer_errors)
        consumes = vllm_config.kv_transfer_config.is_kv_consumer
        self._sends = vllm_config.kv_transfer_config.is_kv_producer
        refusal = self.returns_refusal() if config.bidirectional_kv_xfer else ""
        if refusal:
            logger.warning("layerpush: bidirectional_kv_xfer has no effect on this engine: %s", refusal)
        self._takes_turns, self._keeps_turns = refusal is None and self._sends, refusal is None and consumes
        self.receives: bool = consumes or self._takes_turns
        """Whether the engine loads KV."""
        self._postpones = patches.is_on("failed-loads")
        if consumes:
            patches.check_failure_policy(vllm_config.kv_transfer_config.kv_load_failure_policy)
        self._trace = TraceFile(config.trace_dir if consumes else None, engine_id, SCHEDULER_RANK)
        self.metrics.total(DROPPED_RECORDS, lambda: {"trace": self._trace.dropped})
        ranks = vllm_config.parallel_config.world_size // vllm_config.parallel_config.prefill_context_parallel_size
        self._ranks = ranks
        self.postponed = PostponedLoads(ranks)
        self._ended = EndedCounts(ranks, self.metrics.recorder)  # one rank of a prefill context parallel group pushes
        self._hand_overs = HandOvers(engine_id, self.metrics.recorder, self._trace.write_record)
        self._pushes_by_layer = engine_fallback(self) is None
        self.first_tokens = self._first_tokens(vllm_config) if consumes else None

    def _first_tokens(self, vllm_config: VllmConfig) -> FirstTokens | None:
        if self._config.first_token == "decode" or not patches.is_on("first-tokens"):
            return None
        refusal = first_tokens.engine_refusal(vllm_config, self.prefill_backoff)
        if refusal is not None:
            logger.warning("layerpush: this engine computes first tokens itself, although P could: %s", refusal)
        count = partial(self.metrics.recorder.count, FIRST_TOKENS)
        return FirstTokens(vllm_config, refusal, count, lambda: self._hand_overs.tick(time.perf_counter()))

    def open_side_channel(self, host: str, port: int) -> Callable[..., None]:
        """Listen, and return the function that answers queries. Raises ``SideChannelError`` if the port is taken."""
        return partial(listen, bind(host, port), self._threads)

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """``kv_cache_manager`` owns the engine's KV cache blocks."""
        self._cache_manager = kv_cache_manager
        block_pool = self._block_pool = kv_cache_manager.block_pool
        parts = any(kind.is_state or kind.has_window for kind in self._kinds.all)
        self._keeps_prefixes = kv_cache_manager.enable_caching and not parts
        """Whether a part of a prompt's KV is of use, and the prefix cache can hold it."""
        self.awaited = AwaitedPushes(self.registration_timeout, block_pool)
        self.last_windows = LastWindows(block_pool)
        self._turns = Turns(block_pool, self._ranks)
        self.places = Places(len(block_pool.blocks), self._config.awaited_share)
        self.metrics.level(WAITING_PROMPTS, lambda: self.places.waiting)
        self.metrics.level(PARKED_REQUESTS, lambda: self.awaited.block_holds.parked_requests)
        self.metrics.level(PARKED_BLOCKS, lambda: self.awaited.block_holds.parked_blocks)

    def on_new_request(self, request: Request) -> None:
        """Drop bad ``kv_transfer_params`` before vLLM's code reads them."""
        self._requests[request.request_id] = request
        self._request_filter.drop_invalid(request, time.perf_counter())
        if request.abort_immediately and is_pushed(request.kv_transfer_params):
            self._news.append(PromptRefused(request.request_id, transfer_id(request.kv_transfer_params)))
            request.kv_transfer_params = None
        if lacks_registration(request):
            name_prefill_request(request)
        super().on_new_request(request)
        if lacks_registration(request):
            self.postponed.request_waits(request.request_id, self.prompt_names(request))
        if is_pushed(request.kv_transfer_params):
            if (shared := self._longest_shared(request)) is not None:
                self._turns.bring(request.request_id, shared)
            first_tokens.allow_stop_tokens(request)
            transfer = transfer_id(request.kv_transfer_params)
            self._news.append(Arrived(request.request_id, transfer, self.prompt_digest(request)))
            if self._answers_early and request.kv_transfer_params.get(early_answer.MARK):
                self._answered.add(request.request_id)
                self.metrics.recorder.count(EARLY_ANSWERS, "answered")
        if self._traces_requests and request.trace_headers and request.kv_transfer_params:
            self._news.append(TraceHeaders(request.request_id, dict(request.trace_headers)))

    def prompt_digest(self, request: Request) -> str | None:
        if request.request_id not in self._digests:
            self._digests[request.request_id] = super().prompt_digest(request)
        return self._digests[request.request_id]

    def rank_is_other(self, request_id: str, rank: int) -> None:
        """A request went to another data-parallel ``rank`` of this engine: no registration for it can be served."""
        self._news.append(RankIsOther(request_id, rank))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Note the prefix-cache hit of a request, in tokens. Returns the tokens to load, and whether there are any."""
        if self.postponed.must_wait(request.request_id):
            return None, False
        if lacks_registration(request):
            need = self._kinds.blocks_to_load(request.num_tokens, num_computed_tokens)
            free, awaited = self._block_pool.get_num_free_blocks(), self.awaited.block_holds.awaited_blocks
            if not self.places.takes(need, free, awaited, time.perf_counter()):
                return None, False
        self._prefix_hits.put_hit(request.request_id, num_computed_tokens)
        self._unplaced[request.request_id] = request
        if (shared := self._turns.shared(request.request_id)) is not None:
            tokens = shared - num_computed_tokens
            return (tokens, True) if tokens >= max(1, self.kv_recompute_threshold) else (0, False)
        tokens, loads = self.matched_tokens(request, num_computed_tokens)
        if loads and num_computed_tokens + tokens == request.num_tokens:
            tokens = max(0, self._kinds.tokens_to_load(request.num_tokens) - num_computed_tokens)
        return tokens, loads and tokens > 0

    def _longest_shared(self, request: Request) -> turn.Register | None:
        """The registration for the first tokens of P's prompt that are those of a kept turn. None: it brings none."""
        params, size = request.kv_transfer_params, max(self._kinds.block_sizes)
        try:
            brings_turn = self._takes_turns and is_returned(params, self._config)
        except ParamsError as error:
            self._request_filter.loads_nothing(request, error, time.perf_counter())
            return None
        if not brings_turn or params["remote_engine_id"] == self.engine_id or request.request_id in self._turns:
            return None
        shown, tokens = params.get(PREFIXES) or "", params.get("remote_num_tokens") or 0
        stride = tokens * SHOWN_CHARS // len(shown) if shown else size
        prefixes = None
        if stride >= LEAST_STRIDE:
            prefixes = self.prefixes_of(request, min(tokens, request.num_prompt_tokens - 1), stride)
        if prefixes is None:
            return turn.Register(0, "")
        shared = prefixes.shared(shown or prefixes.shown)
        whole = shared - shared % math.lcm(stride, size)
        return turn.Register(whole, prefixes.digest(whole or shared) or "")

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """A request has its blocks: on D complete its registration, on P begin to load or to plan its prompt."""
        self._unplaced.pop(request.request_id, None)
        match self._turns.handle(request.request_id, turn.Placed(num_external_tokens)):
            case [turn.Register() as register]:
                self.stage_return(request, blocks, num_external_tokens)
                self._await_return(request, blocks, register)
                return
            case [turn.SendDecline(digest)]:
                self._decline(request, digest)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.postponed.request_placed(request.request_id)
        staged = self.take_staged_registration(request.request_id, blocks)
        if staged is not None:
            self.places.placed()
            self._await(request, staged)
        elif lacks_registration(request):
            self._decline(request, self.prompt_digest(request))
            self.forget_receive(request)
        if not is_pushed(request.kv_transfer_params):
            return
        self.last_windows.release(request.request_id)  # the request may have been preempted
        dropped = self._kinds.blocks_dropped_after(request.num_prompt_tokens)
        if any(dropped):
            self._dropped[request.request_id] = request, dropped
        known = self._prompts.get(request.request_id)
        if known is not None:
            known[1].restart()
            self._provisional_steps.forget(request.request_id)
            return
        chosen = chosen_mode(request.kv_transfer_params)
        long_enough = request.num_prompt_tokens >= self._config.layerwise_min_tokens
        whole = not self._pushes_by_layer or not long_enough or (chosen or self._config.mode) is PushMode.WHOLE
        watched = self._pushes_by_layer and self._config.trace_dir is not None
        if not whole or watched or chosen is not None:
            progress = PromptProgress(request.request_id, self._kinds.block_sizes, whole, chosen)
            self._prompts[request.request_id] = (request, progress)

    def _decline(self, request: Request, digest: str | None) -> None:
        """This engine computes the prompt itself: P's blocks need not wait for a registration, nor those of a turn that
        D keeps. ``digest``: see ``Decline``.
        """
        params = request.kv_transfer_params
        address = Address(
            params["remote_engine_id"],
            params["remote_host"],
            params["remote_port"],
            params["tp_size"],
            params.get("pp_size", 1),
        )
        names = request.request_id, self.engine_id, params["remote_request_id"]
        self._news.append(PushDeclined(address, Decline(*names, digest, transfer_id(params))))

    def _await_return(self, request: Request, blocks: KVCacheBlocks, register: turn.Register) -> None:
        staged = self.take_staged_registration(request.request_id, blocks)
        assert staged is not None
        staged.message.update(
            layerpush=PROTOCOL_VERSION,
            prefill_request_id=request.kv_transfer_params["remote_request_id"],
            prompt_digest=register.digest,
            prefix_tokens=register.tokens,
        )
        self.awaited.await_push(request.request_id, staged.blocks, time.perf_counter(), RETURN_S)

    def goes_on_without(self, request_id: str) -> bool:
        """Whether a request computes its prompt, or waits for blocks again, if its load fails, whatever the policy."""
        return self._turns.is_returning(request_id) or self.postponed.is_asked(request_id)

    def _await(self, request: Request, staged: StagedRegistration) -> None:
        staged.message.update(
            layerpush=PROTOCOL_VERSION,
            prefill_request_id=request.kv_transfer_params.get("remote_request_id"),
            transfer_id=transfer_id(request.kv_transfer_params),
            prompt_digest=self.prompt_digest(request),
            **({} if self.first_tokens is None else self.first_tokens.ask(request)),
            attempt=self._attempts.get(request.request_id, 0),
            number=next(self._numbers) if self._keeps_prefixes else 0,
        )
        self._loading[request.request_id] = request, self._prefix_hits.hit(request.request_id)
        self.awaited.await_push(request.request_id, staged.blocks, time.perf_counter())
        self._hand_overs.request_registered(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LayerwiseMetadata:
        """Add the step's plan, and the news since the last step, to vLLM's metadata.

        Raises ``EngineThreadError`` if the side channel's thread has ended.
        """
        self._threads.check()
        self._step_is_due = False
        growth = len(scheduler_output.num_scheduled_tokens) * self._kinds.growing
        failed = any(map(lacks_registration, self._unplaced.values()))
        short_of_blocks = self._is_short_of_blocks() | self.places.step_ended(growth, failed=failed)
        free, now = self._block_pool.get_num_free_blocks(), time.perf_counter()
        for request_id in self._turns.give_way(free, now, short=short_of_blocks):
            self.release_turn(request_id)
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, NixlConnectorMetadata)
        extended = LayerwiseMetadata.extending(metadata)
        extended.short_of_blocks = short_of_blocks
        cancelled = self.awaited.take_cancelled(time.perf_counter())
        postponed = []
        if self._postpones:
            spared = self.awaited.newest(self.places.missing(free, now), self._loading)
            postponed = self.postponed.to_unregister(short_of_blocks or bool(self.places.waiting), spared)
        self._news += [LoadCancelled(request_id, reason) for request_id, reason in cancelled.items()]
        self._news += map(LoadPostponed, postponed)
        extended.news, self._news = self._news, []
        extended.sampled, self._sampled = self._sampled, {}
        extended.prompt_tokens, self._prompt_tokens = self._prompt_tokens, {}
        extended.step_plan = self._plan(scheduler_output)
        self._hold_last_windows(scheduler_output)
        self._hand_overs.requests_scheduled(scheduler_output.num_scheduled_tokens.keys(), time.perf_counter())
        return extended

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the reports of the workers on a step."""
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, WorkerReport)
        for request_id in connector_output.finished_sending or ():
            self.last_windows.release(request_id)
        received, now = connector_output.finished_recving or (), time.perf_counter()
        for each in () if report is None else report.news:
            self._reported(each, now)
        self.awaited.loads_ended(received)
        for request_id in received:
            match self._turns.handle(request_id, turn.LoadEnded(request_id in connector_output.failed_recving)):
                case [turn.Count(tokens)]:
                    self._prefix_hits.put_hit(request_id, tokens)
            loading, kept = self._loading.pop(request_id, None), self._kept.pop(request_id, 0)
            if loading is not None:
                self._keep_prefix(*loading, kept)
            if self.postponed.load_ended(request_id):
                self._wait_again(self._requests[request_id])
        self._hand_overs.loads_reported(received, connector_output.failed_recving, now)
        if self.first_tokens is not None:
            self.first_tokens.loads_ended(received)

    def _reported(self, news: Reported, now: float) -> None:
        """A rank reports after a step. vLLM may have finished the request meanwhile. Then only its blocks matter."""
        if isinstance(news, RequestNews) and news.request_id not in self._requests:
            return
        match news:
            case LoadParked():
                self.awaited.block_holds.park(news.request_id, news.rank)
            case LoadKept():
                self._kept[news.request_id] = min(news.tokens, self._kept.get(news.request_id, news.tokens))
            case LoadCleared():
                self.awaited.block_holds.clear(news.request_id, news.rank)
            case LoadCompleted():
                self._hand_overs.load_completed(news.request_id, news.at, news.clock)
            case LoadToken():
                if self.first_tokens is not None:
                    self.first_tokens.token_reported(news.request_id, news.token)
            case LoadQueued():
                self.postponed.load_queued(news.request_id, news.computed)
            case LoadUnregistered():
                self.postponed.load_unregistered(news.request_id, news.rank)
            case TurnEnded():
                self._turns.handle(news.request_id, turn.RankEnded(news.rank))
            case PushWithdrawn():
                if news.request_id in self._answered:
                    self._withdrawn.add(news.request_id)
            case AbortsPending():  # a step without a report does not come here
                self._workers_settle_until, self._step_is_due = now + NEXT_REPORT_S, True
            case Ended():
                self._ended.report_ended(news, now)
            case _:
                assert_never(news)

    def _keep_prefix(self, request: Request, cached: int, tokens: int) -> None:
        """A load has ended. The KV of the prompt's first ``tokens`` tokens stays although it has failed; of ``cached``
        tokens it was in the prefix cache before. It goes there: the request finds it, or one that tries again.
        """
        tokens = min(tokens, request.num_prompt_tokens)
        tokens -= tokens % max(self._kinds.block_sizes)
        if tokens > cached:
            self._cache_manager.cache_blocks(request, tokens)
            self.metrics.recorder.count(KEPT_TOKENS, number=tokens - cached)

    def _wait_again(self, request: Request) -> None:
        """A load has given way: its request waits for blocks, and is registered again."""
        request_id = request.request_id
        self._attempts[request_id] = self._attempts.get(request_id, 0) + 1
        request.kv_transfer_params["do_remote_prefill"] = True
        super().on_new_request(request)  # vLLM's heartbeats name it again
        self.postponed.request_waits(request_id, self.prompt_names(request))
        if self.first_tokens is not None:
            self.first_tokens.request_finished(request_id)

    def take_withdrawn(self) -> set[str]:
        """The answered requests whose decode engine has withdrawn since the last call. The caller aborts them."""
        taken, self._withdrawn = self._withdrawn, set()
        for _ in taken:
            self.metrics.recorder.count(EARLY_ANSWERS, "withdrawn")
        return taken

    def take_metrics(self, now: float) -> MetricDelta | None:
        """Metrics since the last call. vLLM asks at the end of each step."""
        self._hand_overs.tick(now)
        self._ended.tick(now)
        return self.metrics.take_delta(now)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request, and cancel its load if it has one. Returns vLLM's answer."""
        self._requests.pop(request.request_id, None)
        known = self._prompts.pop(request.request_id, None)
        self._prefix_hits.forget(request.request_id)
        self._provisional_steps.forget(request.request_id)
        self._answered.discard(request.request_id)
        self._unplaced.pop(request.request_id, None)
        self._attempts.pop(request.request_id, None)
        self.postponed.request_finished(request.request_id)
        never_registered = lacks_registration(request)
        match self._turns.handle(request.request_id, turn.Finished()):
            case [turn.SendDecline(digest)]:
                self._decline(request, digest)
            case _ if never_registered:
                self._decline(request, self.prompt_digest(request))
        if self._dropped.pop(request.request_id, None) is not None:
            block_ids = self.last_windows.restored(request.request_id, block_ids)
        outcome: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        if not outcome[0]:
            self.last_windows.release(request.request_id)
        if outcome[0]:
            ends = self._kinds.end_with_prompt(block_ids, request.num_prompt_tokens)
            self._prompt_tokens[request.request_id] = request.num_prompt_tokens if ends else 0
        stale = self._token_may_be_stale and known is not None and known[1].rewound
        if outcome[0] and not stale and (sampled := self.sampled_token(request)) is not None:
            self._sampled[request.request_id] = sampled
        if never_registered:
            self.cancel_receive(request.request_id)
        self.awaited.request_finished(request.request_id)
        self._hand_overs.request_finished(request.request_id, time.perf_counter())
        answer = outcome if outcome[0] else (False, outcome[1] or self._keep_turn(request, block_ids))
        if self.first_tokens is not None:
            self.first_tokens.request_finished(request.request_id, answer[1])
        self._digests.pop(request.request_id, None)
        return answer

    def _keep_turn(self, request: Request, block_ids: Any) -> dict[str, Any] | None:
        """D's request has its answer: keep its full blocks for the next turn. The last token has no KV. None: do not.

        Of several answers (``n``) the client gets one engine request's params.
        """
        if (
            not self._keeps_turns
            or not request.kv_transfer_params
            or is_pushed(request.kv_transfer_params)
            or is_one_of_several(request.request_id)
            or not has_answer(request)
            or request.request_id in self._turns
        ):
            return None
        size = max(self._kinds.block_sizes)
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        tokens -= tokens % size
        prefixes = self.prefixes_of(request, tokens, size)
        if not tokens or prefixes is None:
            return None
        tables = self.get_exchange_clipped_blocks(block_ids)
        blocks = tuple(
            list(table[: tokens // each]) for table, each in zip(tables, self._kinds.block_sizes, strict=True)
        )
        self._news.append(Arrived(request.request_id, prefixes=prefixes))
        self._prompt_tokens[request.request_id] = tokens
        self._turns.keep(request.request_id, itertools.chain.from_iterable(blocks))
        return self.keep_turn(request, blocks, tokens, prefixes.shown)

    def reset_cache(self, reset: Callable[[], bool]) -> bool:
        """vLLM's ``reset`` of its prefix cache, as if no turn was kept. If it succeeds, every kept turn ends."""
        with self._turns.lent():
            done = reset()
        for request_id in self._turns.release(time.perf_counter()) if done else ():
            self.release_turn(request_id)
        return done

    def shutdown(self) -> None:
        """Stop vLLM's scheduler side, and close the trace."""
        self._threads.close()
        super().shutdown()
        self._trace.close()

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to step although it has no request: workers still have outcomes to report."""
        pending = super().has_pending_push_work() or self._news or self._turns.needs_steps
        return bool(pending) or self.awaited.needs_steps or self._workers_settle

    @property
    def _workers_settle(self) -> bool:
        return self._step_is_due or time.perf_counter() < self._workers_settle_until

    def _plan(self, output: SchedulerOutput) -> StepPlan:
        accepted = tuple(request_id for request_id in self._provisional_steps.begin() if self._is_computed(request_id))
        hits = self._prefix_hits.pop_hits(output.num_scheduled_tokens)
        cached = self._cached(output, hits) if hits and self._sends else {}
        if not self._prompts:
            return StepPlan()
        preempted = tuple(request_id for request_id in output.preempted_req_ids or () if request_id in self._prompts)
        rewound, chunks = [], []
        blocks = output.kv_connector_block_state
        assert blocks is not None
        for request_id, scheduled in output.num_scheduled_tokens.items():
            known = self._prompts.get(request_id)
            if known is None:
                continue
            request, progress = known
            table = blocks.get_block_ids(request_id)
            if table is None:
                continue
            tables = self._kinds.transfer_tables(table)
            epoch = progress.epoch
            new = []
            if not progress.chunks and cached.get(request_id):
                new.append(progress.plan_cached(cached[request_id], request.num_prompt_tokens, tables))
            new.append(progress.advance(request.num_computed_tokens, scheduled, request.num_prompt_tokens, tables))
            if progress.epoch != epoch:
                rewound.append(request_id)
                self._provisional_steps.forget(request_id)
            if progress.provisional and any(chunk is not None and chunk.final for chunk in new):
                self._provisional_steps.awaits(request_id)
            chunks += new
        planned = tuple(chunk for chunk in chunks if chunk is not None)
        return StepPlan(planned, preempted, tuple(rewound), accepted)

    def _is_computed(self, request_id: str) -> bool:
        """Whether vLLM counts the request's whole prompt as computed: it has taken no step of it back."""
        known = self._prompts.get(request_id)
        return known is not None and known[0].num_computed_tokens >= known[0].num_prompt_tokens

    def _is_short_of_blocks(self) -> bool:
        """Whether a request that vLLM has looked at in this step needs more blocks than are free."""
        unplaced, self._unplaced = self._unplaced, {}
        free = self._block_pool.get_num_free_blocks()
        return any(
            sum(-(-each.num_tokens // size) for size in self._kinds.block_sizes) > free for each in unplaced.values()
        )

    def _hold_last_windows(self, output: SchedulerOutput) -> None:
        for request_id, (request, dropped) in self._dropped.items():
            scheduled = output.num_scheduled_tokens.get(request_id, 0)
            if request.num_computed_tokens < request.num_prompt_tokens <= request.num_computed_tokens + scheduled:
                blocks = output.kv_connector_block_state
                assert blocks is not None
                self.last_windows.hold(request_id, dropped, blocks.get_block_ids(request_id))

    def _cached(self, output: SchedulerOutput, hits: Mapping[str, int]) -> dict[str, int]:
        """Leading tokens in P's memory before the step, by request id. Empty if that matters to no push.

        Notes also which of these requests, the ones that begin to run, read blocks that may be lost.
        """
        old, blocks = output.scheduled_cached_reqs, output.kv_connector_block_state
        computed = dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}

        def tables(request_id: str) -> Tables:
            table = blocks.get_block_ids(request_id) if blocks is not None else None
            assert table is not None
            return self._kinds.transfer_tables(table)

        for request_id in self._provisional_steps.begin_requests(hits, computed, tables):
            if request_id in self._prompts:
                self._prompts[request_id][1].provisional = True
        if not any(hits.get(request_id) for request_id, (_, progress) in self._prompts.items() if not progress.chunks):
            return {}
        return self._prefix_hits.in_memory(hits, output.num_scheduled_tokens, computed, tables)
