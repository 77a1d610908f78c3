"""P answers its router before it has computed the prompt, for routers that ask D only after that.

A router that asks P first and D second gives D no time to register while P computes: nothing overlaps. With
``answer_early`` P's API server answers as soon as the engine has the request, with the params that P's answer would
have, and an empty choice. The engine goes on computing. The router asks D, D registers, and P pushes by layer.

Two processes take part:

- The front end. ``to_sampling_params`` of an OpenAI request notes whether its router wants the transfer only; any other
  program that calls the engine does so by asking for one token. ``AsyncLLM.generate`` then answers, and marks the
  params for the engine core.
- The engine core. The router's client can no longer abort P's request, so D's withdrawal has to. P's workers report it
  to the scheduler. ``Scheduler.update_from_output`` then aborts the request, and reports the abort to the front end.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from layerpush.compat.admission import pushed_params
from layerpush.compat.patches import our_connectors
from layerpush.core.transfer_config import connectors_in

MARK = "layerpush_early"
"""A key of P's ``kv_transfer_params``: the front end has answered the request. It removes a client's own such key."""
_ENOUGH = "layerpush_transfer_is_enough"
"""A key of ``extra_args`` from ``to_sampling_params`` to ``generate``; absent if another program calls the engine."""

logger = logging.getLogger(f"vllm.{__name__}")


_computing: set[asyncio.Task[None]] = set()
"""Requests of this process that are answered and not computed yet."""


def answering_early(plain: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """``AsyncLLM.generate``: answers at once, and marks the params for the engine core."""
    allowed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(plain)
    def generate(
        engine: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        transfer = pushed_params(sampling_params)
        if transfer is not None:
            transfer.pop(MARK, None)  # a client's
            enough = sampling_params.extra_args.pop(_ENOUGH, None)
            if enough is None:
                enough = _asks_for_one_token(sampling_params)
            if enough and not args and _is_one_prompt(prompt, sampling_params):
                if engine not in allowed:
                    allowed[engine] = _allows(engine.vllm_config)
                if allowed[engine]:
                    transfer[MARK] = True
                    return _answer(engine, prompt, sampling_params, request_id, kwargs)
        return plain(engine, prompt, sampling_params, request_id, *args, **kwargs)

    return generate


async def _answer(
    engine: Any, prompt: Any, sampling_params: Any, request_id: str, options: Mapping[str, Any]
) -> AsyncGenerator[Any, None]:
    """Errors of admission reach the client, as ``generate``'s do. Later ones reach D only."""
    from vllm.outputs import CompletionOutput, RequestOutput

    queue = await engine.add_request(request_id, prompt, sampling_params, **options)
    task = asyncio.create_task(_drain(queue))
    _computing.add(task)
    task.add_done_callback(_computing.discard)
    yield RequestOutput(
        request_id=request_id,
        prompt=prompt.get("prompt"),
        prompt_token_ids=prompt["prompt_token_ids"],
        prompt_logprobs=None,
        outputs=[CompletionOutput(0, "", [], None, None, finish_reason="length")],
        finished=True,
        kv_transfer_params=_transfer_params(engine.vllm_config, queue.request_id),
    )


def marking(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``to_sampling_params`` of an OpenAI request: notes whether the router wants the transfer only."""

    @functools.wraps(plain)
    def to_sampling_params(request: Any, *args: Any, **kwargs: Any) -> Any:
        params = plain(request, *args, **kwargs)
        if pushed_params(params) is not None:
            params.extra_args[_ENOUGH] = _wants_the_transfer_only(request)
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


def _asks_for_one_token(sampling_params: Any) -> bool:
    """Whether a program that calls the engine itself, as SMG's and Dynamo's do, needs only the answer's params."""
    more = (sampling_params.logprobs, sampling_params.prompt_logprobs)
    return sampling_params.max_tokens == 1 and more == (None, None)


def _is_one_prompt(prompt: Any, sampling_params: Any) -> bool:
    """Whether the engine gets one prompt of tokens, for one answer."""
    return isinstance(prompt, dict) and bool(prompt.get("prompt_token_ids")) and sampling_params.n == 1


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


def aborting_withdrawn(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.update_from_output``: aborts requests that D has withdrawn from, and reports it to the front end."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    @functools.wraps(plain)
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = plain(self, *args, **kwargs)
        withdrawn = [each.connector_scheduler.take_withdrawn() for each, _ in our_connectors(self.connector)]
        for request_id in itertools.chain(*withdrawn):
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

    return update_from_output
