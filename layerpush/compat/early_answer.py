"""P answers its router before it has computed the prompt, for routers that ask D only after that.

A router that asks P first and D second gives D no time to register while P computes: nothing overlaps. With
``answer_early`` P's API server answers as soon as the engine has the request, with the params that P's answer would
have, and an empty choice. The engine goes on computing. The router asks D, D registers, and layers stream.

Two processes take part:

- The front end. ``EarlyAnswers`` patches two methods. ``to_sampling_params`` of OpenAI requests notes that a router
  wants the transfer only. ``AsyncLLM.generate`` then answers, and marks the params for the engine core.
- The engine core. The router's client can no longer abort P's request, so D's withdrawal has to. P's workers report it
  to the scheduler. ``install`` wraps ``Scheduler.update_from_output``, which then aborts the request, and reports the
  abort to the front end.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from layerpush.compat.admission import connectors_in
from layerpush.compat.import_hook import ImportHook

ENGINE = "vllm.v1.engine.async_llm"
COMPLETIONS = "vllm.entrypoints.openai.completion.protocol"
CHATS = "vllm.entrypoints.openai.chat_completion.protocol"
_PATCHED = {
    ENGINE: ("AsyncLLM", "generate"),
    COMPLETIONS: ("CompletionRequest", "to_sampling_params"),
    CHATS: ("ChatCompletionRequest", "to_sampling_params"),
}
"""Module -> its class and method."""

MARK = "layerpush_early"
"""A key of P's ``kv_transfer_params``: the front end has answered the request. It removes a client's own such key."""
_ENOUGH = "layerpush_transfer_is_enough"
"""A key of ``extra_args`` between ``to_sampling_params`` and ``generate``."""

logger = logging.getLogger(f"vllm.{__name__}")


class EarlyAnswers(ImportHook):
    """Patches the front end."""

    names = frozenset(_PATCHED)

    def __init__(self) -> None:
        self._allowed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._computing: set[asyncio.Task[None]] = set()

    def patch(self, module: ModuleType) -> None:
        owner, name = _PATCHED[module.__name__]
        target: Any = getattr(module, owner, None)
        plain: Any = getattr(target, name, None)
        if plain is None:
            logger.warning("%s.%s does not exist in this vLLM: answer_early has no effect", module.__name__, name)
        elif not hasattr(plain, "answers_early"):
            wrapped: Any = self._generate(plain) if module.__name__ == ENGINE else _marking(plain)
            wrapped.answers_early = True
            setattr(target, name, wrapped)

    def _generate(self, plain: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
        @functools.wraps(plain)
        def generate(
            engine: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            transfer = streamed(sampling_params)
            if transfer is not None:
                transfer.pop(MARK, None)  # a client's
                enough = sampling_params.extra_args.pop(_ENOUGH, False)
                if enough and not args and _is_short(prompt, sampling_params) and self._allows(engine):
                    transfer[MARK] = True
                    return self._answer(engine, prompt, sampling_params, request_id, kwargs)
            return plain(engine, prompt, sampling_params, request_id, *args, **kwargs)

        return generate

    def _allows(self, engine: Any) -> bool:
        if engine not in self._allowed:
            self._allowed[engine] = _allows(engine.vllm_config)
        return self._allowed[engine]

    async def _answer(
        self, engine: Any, prompt: Any, sampling_params: Any, request_id: str, options: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Errors of admission reach the client, as ``generate``'s do. Later ones reach D only."""
        from vllm.outputs import CompletionOutput, RequestOutput

        queue = await engine.add_request(request_id, prompt, sampling_params, **options)
        task = asyncio.create_task(_drain(queue))
        self._computing.add(task)
        task.add_done_callback(self._computing.discard)
        yield RequestOutput(
            request_id=request_id,
            prompt=prompt.get("prompt"),
            prompt_token_ids=prompt["prompt_token_ids"],
            prompt_logprobs=None,
            outputs=[CompletionOutput(0, "", [], None, None, finish_reason="length")],
            finished=True,
            kv_transfer_params=_transfer_params(engine.vllm_config, queue.request_id),
        )


def _marking(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def to_sampling_params(request: Any, *args: Any, **kwargs: Any) -> Any:
        params = plain(request, *args, **kwargs)
        if streamed(params) is not None and _wants_the_transfer_only(request):
            params.extra_args[_ENOUGH] = True
        return params

    return to_sampling_params


def _wants_the_transfer_only(request: Any) -> bool:
    """Whether the router needs only the params of P's answer: a choice without text is enough."""
    more = ("stream", "echo", "logprobs", "prompt_logprobs", "return_token_ids", "use_beam_search")
    wanted = [getattr(request, name, None) for name in more]
    if any(value is not None and value is not False for value in wanted) or (request.n or 1) > 1:
        return False
    prompt = getattr(request, "prompt", "")
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt))


def streamed(sampling_params: Any) -> dict[str, Any] | None:
    """The request's ``kv_transfer_params`` if this engine is to push its KV."""
    transfer = (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params")
    return transfer if isinstance(transfer, dict) and transfer.get("do_remote_decode") is True else None


def _is_short(prompt: Any, sampling_params: Any) -> bool:
    """Whether the engine gets one prompt of tokens, and gives one answer, at the end."""
    if not isinstance(prompt, dict) or not prompt.get("prompt_token_ids"):
        return False
    return bool(sampling_params.n == 1 and sampling_params.output_kind.name == "FINAL_ONLY")


def _allows(vllm_config: Any) -> bool:
    """Whether this engine's config asks for early answers. Logs a warning if it does and the engine gives none."""
    transfer = vllm_config.kv_transfer_config
    found = () if transfer is None else tuple(connectors_in(vars(transfer)))
    if not any(settings.config.answer_early for settings in found):
        return False
    if transfer.kv_connector == "MultiConnector":
        logger.warning("layerpush: answer_early has no effect inside of MultiConnector")
        return False
    if vllm_config.parallel_config.data_parallel_size > 1:  # it is not known yet which rank will have the request
        logger.warning("layerpush: answer_early has no effect with data_parallel_size above 1")
        return False
    return all(settings.role != "kv_consumer" for settings in found)


def _transfer_params(vllm_config: Any, request_id: str) -> dict[str, Any]:
    """The params of vLLM's own answer at the end of a request, without those that D does not read in push mode."""
    from vllm import envs

    parallel = vllm_config.parallel_config
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [],
        "remote_engine_id": vllm_config.kv_transfer_config.engine_id,
        "remote_request_id": request_id,
        "remote_host": envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        "remote_port": envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        "tp_size": parallel.tensor_parallel_size,
        "dcp_size": parallel.decode_context_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "transfer_mode": "push",
    }


async def _drain(queue: Any) -> None:
    """Wait for the request's end, as ``AsyncLLM.generate`` would."""
    try:
        while not (queue.get_nowait() or await queue.get()).finished:
            pass
    except Exception as error:  # noqa: BLE001  the router has its answer: no caller is left
        logger.info("layerpush: the answered request %s has ended: %s", queue.request_id, error)
    finally:
        queue.close()


def install() -> None:
    """Have every scheduler of this process abort requests that D has withdrawn from. Later calls do nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    plain = Scheduler.update_from_output
    if hasattr(plain, "aborts_withdrawn"):
        return

    @functools.wraps(plain)
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = plain(self, *args, **kwargs)
        for request_id in _withdrawn(self):
            for request in self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED):
                logger.info("layerpush: request %s is aborted, because its decode engine has withdrawn", request_id)
                output = EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        return outputs

    update_from_output.aborts_withdrawn = True  # type: ignore[attr-defined]
    Scheduler.update_from_output = update_from_output


def _withdrawn(scheduler: Any) -> Iterator[str]:
    take = getattr(getattr(scheduler.connector, "connector_scheduler", None), "take_withdrawn", None)
    return iter(() if take is None else take())
