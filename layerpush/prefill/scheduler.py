"""The scheduler's half of a prefill engine: engine step -> StepPlan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from layerpush import compat
from layerpush.config import LayerPushConfig
from layerpush.prefill.plan import PromptProgress, StepPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.layerpush.scheduler")


class LayerwisePushScheduler(compat.NixlPushConnectorScheduler):
    """Upstream's push scheduler, and a plan of every step for the workers. Runs in the scheduler's thread."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: LayerPushConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = config
        self._block_sizes = compat.block_sizes(kv_cache_config)
        self._prompts: dict[str, tuple[Request, PromptProgress]] = {}
        can_stream = compat.engine_fallback(self) is None
        self._streams = config.layerwise and can_stream
        self._plans = can_stream and (config.layerwise or config.trace_dir is not None)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not self._plans or not compat.is_streamed(request):
            return
        known = self._prompts.get(request.request_id)
        if known is not None:
            known[1].restart()
            return
        streams = self._streams and request.num_prompt_tokens >= self._config.layerwise_min_tokens
        if streams or self._config.trace_dir is not None:
            progress = PromptProgress(request.request_id, self._block_sizes, streams)
            self._prompts[request.request_id] = (request, progress)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> compat.LayerwiseMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, compat.NixlConnectorMetadata)
        return compat.LayerwiseMetadata.extending(metadata, self._plan(scheduler_output))

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._prompts.pop(request.request_id, None)
        outcome: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return outcome

    def _plan(self, output: SchedulerOutput) -> StepPlan:
        if not self._prompts:
            return StepPlan()
        revoked = {request_id for request_id in output.preempted_req_ids or () if request_id in self._prompts}
        chunks = []
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
            tables = self.kv_cache_config.select_transfer_block_ids(table)
            epoch = progress.epoch
            chunk = progress.advance(request.num_computed_tokens, scheduled, request.num_prompt_tokens, tables)
            if progress.epoch != epoch:
                revoked.add(request_id)
            if chunk is not None:
                chunks.append(chunk)
        return StepPlan(tuple(chunks), tuple(revoked))
