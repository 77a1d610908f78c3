"""D's scheduler starts a request with P's first token, if the request allows it.

vLLM's scheduler computes the last token of a loaded prompt once more, to sample from it. ``FirstTokens`` appends P's
token instead, as soon as the load is complete, and returns it as the request's output. To the scheduler the request
then has one output token, and the next step computes this token's KV. vLLM's first model runner, V1, builds a new
request from its prompt alone. So ``amend`` shows it the token as the prompt's last, and one output token less. The
second runner, V2, takes all tokens of a new request.

So two methods of vLLM's ``Scheduler`` are wrapped: ``update_from_output``, which returns a step's outputs, and
``schedule``, which returns the input of the runner.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from layerpush.compat.patches import our_connectors
from layerpush.core.first_token import Missing, ParameterDigests, sampling_digest
from layerpush.core.request_names import is_one_of_several

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

PREFILL = "prefill"
"""Counted for a request that starts with P's token. Every other counted value is the reason why a request does not."""

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "bad_words", "thinking_token_budget",
    "structured_outputs",
)  # fmt: skip

_DEFAULTS = {name: getattr(SamplingParams(), name) for name in _SAMPLING}
PARAMETER_DIGITS = 8


def sampling_of(params: SamplingParams) -> tuple[str, ParameterDigests]:
    """A digest of all parameters that change the first token's probabilities, in hexadecimal digits, and those that are
    not vLLM's defaults. A seed changes none.
    """
    values = {name: getattr(params, name) for name in _SAMPLING}
    if not params.all_stop_token_ids:  # to the first token `min_tokens` forbids these, whatever its number is
        values["min_tokens"] = 0
    chosen = [(name, value) for name, value in values.items() if value != _DEFAULTS[name]]
    parameters = tuple((name, sampling_digest([value])[:PARAMETER_DIGITS]) for name, value in chosen)
    return sampling_digest(values.values()), parameters


def allow_stop_tokens(request: Request) -> None:
    """Have P sample a first token of D's probabilities, although the router has sent P alone ``min_tokens: 1``.

    vllm-router and others send it because P ends with `length` then. It forbids P to sample a stop token, which
    D's request may begin with. A D whose own request has ``min_tokens`` does not ask for P's token. A P that computes
    more than one token keeps its parameters.
    """
    params = request.sampling_params
    if params is not None and params.min_tokens and request.max_tokens == 1:
        request.sampling_params = copy.copy(params)  # the front end may have the same object
        request.sampling_params.min_tokens = 0


def engine_refusal(vllm_config: VllmConfig, prefill_backoff: int) -> str | None:
    """The reason why no request of this decode engine can start with P's token; None if requests can.

    ``prefill_backoff`` is the number of tokens at a prompt's end that P leaves to D.
    """
    model = vllm_config.model_config
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if vllm_config.speculative_config is not None:
        return "it decodes speculatively"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "its layers are spread over a pipeline"
    if prefill_backoff:
        return "P computes this model's prompts only up to their last tokens"
    if model.logits_processors or entry_points(group="vllm.logits_processors"):
        return "it has logits processors of its own"
    if vllm_config.watermark_config is not None:
        return "it watermarks its tokens"
    if model.is_diffusion or model.is_encoder_decoder:
        return "its model does not sample one token after the other"
    if model.return_sampling_mask or vllm_config.aux_output_config.enabled:
        return "it returns more of a sampled token than the token"
    if not issubclass(scheduler, Scheduler):
        return f"its scheduler {scheduler.__qualname__} is not vLLM's"
    if scheduler.schedule is not Scheduler.schedule or scheduler.update_from_output is not Scheduler.update_from_output:
        return f"its scheduler {scheduler.__qualname__} has methods of its own"
    return None


class FirstTokens:
    """The first tokens of one decode engine. Runs in the scheduler's thread.

    A request that asks for P's token has one entry here: in ``_asked`` during its load, in ``_loaded`` until the end of
    the step that reports the load as over, and in ``_started`` if it starts with P's token.

    ``count`` gets, once for each load, ``PREFILL`` or the reason why the engine computes the token. If ``refusal`` is
    not None, no request asks for a token. ``on_start`` is called after a request has started with P's token.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        refusal: str | None,
        count: Callable[[str], None],
        on_start: Callable[[], None],
    ) -> None:
        self._max_tokens = vllm_config.model_config.max_model_len
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._refused = refusal is not None
        self._count = count
        self._on_start = on_start
        self._asked: dict[str, _Known] = {}
        self._loaded: dict[str, _Known] = {}
        self._started: dict[str, int] = {}
        self._ended: tuple[str, dict[str, Any] | None] | None = None
        """While a first token ends an answer: its request, and the answer's ``kv_transfer_params``."""

    def ask(self, request: Request) -> dict[str, Any]:
        """The fields of a registration that asks for P's token. Empty: D computes this request's first token."""
        reason = "engine" if self._refused else _refusal(request, self._max_tokens)
        if reason is not None:
            self._count(reason)
            return {}
        self._asked[request.request_id] = None
        sampling, parameters = sampling_of(request.sampling_params)
        return {"sampling": sampling, "parameters": parameters}

    def token_reported(self, request_id: str, token: int | Missing) -> None:
        """A rank has P's token for a load, or the reason that there is none. One rank's token is every rank's."""
        if request_id in self._asked and not isinstance(self._asked[request_id], int):
            self._asked[request_id] = token

    def loads_ended(self, received: Iterable[str]) -> None:
        """These loads are over on all ranks."""
        self._loaded.update({request_id: self._asked.pop(request_id) for request_id in self._asked.keys() & received})

    def request_finished(self, request_id: str, answer: dict[str, Any] | None = None) -> None:
        """The engine has finished the request, in any state. ``answer``: the answer's ``kv_transfer_params``."""
        if self._ended is not None and self._ended[0] == request_id:
            self._ended = request_id, answer
        for known in (self._asked, self._loaded, self._started):
            known.pop(request_id, None)

    def start(self, scheduler: Scheduler) -> Iterator[tuple[int, EngineCoreOutput]]:
        """Start the requests whose loads are over, if they can start. Yields outputs, each with its client's index."""
        loaded, self._loaded = self._loaded, {}
        for request_id, known in loaded.items():
            request = scheduler.requests[request_id]
            if request_id in scheduler.failed_recving_kv_req_ids or known is None:
                self._count("failed_load")
                continue
            reason = self._late_refusal(scheduler, request, known)
            self._count(reason or PREFILL)
            if reason is None:
                assert isinstance(known, int)
                yield request.client_index, self._start(scheduler, request, known)

    def amend(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Show P's token to the first model runner as the end of the prompt: it takes a new request's prompt only."""
        if not self._started or scheduler.use_v2_model_runner:
            return
        for new in output.scheduled_new_reqs:
            if (token := self._started.get(new.req_id)) is not None:
                new.prompt_token_ids = [*new.prompt_token_ids, token]
        old = output.scheduled_cached_reqs
        for index, request_id in enumerate(old.req_ids):
            if request_id in self._started:
                old.num_output_tokens[index] -= 1

    def _late_refusal(self, scheduler: Scheduler, request: Request, known: int | Missing) -> str | None:
        if not isinstance(known, int):
            return known
        if known >= self._vocabulary:
            return "invalid"
        if _stops(request, known):
            return None
        # Without a block for the token's KV the request could not run. It could not be preempted either: the runner
        # does not know it yet.
        manager = scheduler.kv_cache_manager
        if manager.block_pool.get_num_free_blocks() < len(manager.kv_cache_config.kv_cache_groups):
            return "no_block"
        return None

    def _start(self, scheduler: Scheduler, request: Request, token: int) -> EngineCoreOutput:
        stops = _stops(request, token)
        if stops:  # the KV of the prompt is as good as that of any other request
            scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        else:
            request.num_computed_tokens = request.num_prompt_tokens  # a load may leave out the last, though P has it
            room = scheduler.kv_cache_manager.allocate_slots(request, 1, delay_cache_blocks=True)
            assert room is not None
            self._started[request.request_id] = token
        request.append_output_token_ids(token)
        self._on_start()
        if scheduler.log_stats:  # the scheduler records it in a later step: vLLM ignores that second event
            request.record_event(EngineCoreEventType.SCHEDULED, time.monotonic())
        prefill_stats = request.take_prefill_stats()
        if prefill_stats is not None:
            prefill_stats.finalize(scheduler.kv_cache_manager.estimate_cached_tokens(request))
        answer = None
        if stops:
            request.stop_reason = None if token == request.sampling_params.eos_token_id else token
            self._ended = request.request_id, None
            scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_STOPPED)  # returns no answer
            (_, answer), self._ended = self._ended, None
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            kv_transfer_params=answer,
            events=request.take_events(),
            prefill_stats=prefill_stats,
            trace_headers=request.trace_headers,
        )


_Known = int | Missing | None
"""P's token, or the reason that there is none. None: the workers have reported neither."""


def _stops(request: Request, token: int) -> bool:
    """Whether the token ends the request's answer.

    D must not sample another token instead: it would prefer answers that go on.
    """
    params = request.sampling_params
    return token == params.eos_token_id or token in (params.stop_token_ids or ())


def _refusal(request: Request, max_tokens: int) -> str | None:
    """The reason why this request cannot start with P's token, whatever the token is."""
    params = request.sampling_params
    if params is None or request.resumable or request.num_preemptions or request.num_output_tokens:
        return "resumed"
    if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "multimodal"
    if params.logprobs is not None or params.prompt_logprobs is not None or params.logprob_token_ids is not None:
        return "logprobs"
    if request.use_structured_output:
        return "structured_output"
    if (
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.min_tokens
        or params.bad_words
        or params.thinking_token_budget is not None
    ):
        return "penalties"
    if params.sampling_type == SamplingType.RANDOM_SEED:
        return "seed"
    if is_one_of_several(request.request_id):
        return "n"
    if request.max_tokens <= 1 or request.num_tokens + 1 >= max_tokens:
        return "ends"
    return None


def starting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.update_from_output``."""

    @functools.wraps(plain)
    def update_from_output(self: Scheduler, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = plain(self, *args, **kwargs)
        for first_tokens in _of(self):
            for client, output in first_tokens.start(self):
                outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        return outputs

    return update_from_output


def amending(plain: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    """``Scheduler.schedule``."""

    @functools.wraps(plain)
    def schedule(self: Scheduler, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = plain(self, *args, **kwargs)
        for first_tokens in _of(self):
            first_tokens.amend(self, output)
        return output

    return schedule


def _of(scheduler: Scheduler) -> list[FirstTokens]:
    found = [each.connector_scheduler.first_tokens for each, _ in our_connectors(scheduler.connector)]
    return [first_tokens for first_tokens in found if first_tokens is not None]
