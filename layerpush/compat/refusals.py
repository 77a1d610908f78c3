"""The front end reports the requests that it refuses to the engine core, so that the other engine hears of it at once.

vLLM itself reports one on D: a *placeholder* goes to the engine core, which aborts it at once. So D's scheduler sends a
`Decline`, and P's one refuses D's registration. But vLLM reports nothing on P, nothing of a stream that is refused
after its answer has begun, nothing of a body that it cannot read, and only one of several prompts and answers.

So three functions are wrapped: the one of the OpenAI servers that reports, the one of all Python front ends that gives
the engine a request, and the one that answers an invalid body. No request is reported that the engine has got.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from layerpush.core.request_params import TRANSFER, is_pushed
from layerpush.core.transfer_config import connectors_in

MOST = 64
"""Prompts and answers of one body that are reported. A short body may have a great many."""

logger = logging.getLogger(f"vllm.{__name__}")

_given: ContextVar[set[str] | None] = ContextVar("_given", default=None)
"""The names of the requests of one body that the engine has got, or that are reported."""


def reporting_bodies(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``GenerateBaseServing._with_kv_transfer_rejection_cleanup``: reports all that the engine has not got."""

    @functools.wraps(plain)
    async def with_kv_transfer_rejection_cleanup(
        serving: Any, awaitable: Awaitable[Any], request: Any, raw_request: Any
    ) -> Any:
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        transfer = _transfer(request.kv_transfer_params, serving.engine_client)
        if transfer is None:
            return await plain(serving, awaitable, request, raw_request)
        given: set[str] = set()
        _given.set(given)
        refused = True
        try:
            result = await awaitable
            refused = isinstance(result, ErrorResponse)
            return result
        finally:
            if refused:
                names = _names(functools.partial(_get, request), raw_request)
                rank = serving._get_data_parallel_rank(raw_request)
                await _report(serving.engine_client, (name for name in names if name not in given), transfer, rank)

    return with_kv_transfer_rejection_cleanup


def reporting_tokens(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``ServingTokens.serve_tokens``, which does not report."""

    @functools.wraps(plain)
    async def serve_tokens(serving: Any, request: Any, raw_request: Any = None) -> Any:
        answer = plain(serving, request, raw_request)
        return await serving._with_kv_transfer_rejection_cleanup(answer, request, raw_request)

    return serve_tokens


def reporting_requests(plain: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """``AsyncLLM.add_request``: reports a request that it raises an error for."""

    @functools.wraps(plain)
    async def add_request(engine: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        names = _answers(request_id, getattr(params, "n", 1))
        try:
            queue = await plain(engine, request_id, prompt, params, *args, **kwargs)
        except Exception:  # the request has failed, and its caller gets the error; the other engine is told
            extra = getattr(params, "extra_args", None) or {}
            transfer = None if engine.errored else _transfer(extra.get("kv_transfer_params"), engine)
            if transfer is not None:
                await _report(engine, names, transfer, kwargs.get("data_parallel_rank"))
            raise
        if (given := _given.get()) is not None:
            given.update(names)
        return queue

    return add_request


def reporting_invalid_bodies(plain: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """``validation_exception_handler`` of the API server."""

    @functools.wraps(plain)
    async def validation_exception_handler(req: Any, exc: Any) -> Any:
        body, client = exc.body, getattr(req.app.state, "engine_client", None)
        if isinstance(body, dict) and client is not None:
            transfer = _transfer(body.get("kv_transfer_params"), client)
            if transfer is not None:
                await _report(client, _names(body.get, req), transfer, None)
        return await plain(req, exc)

    return validation_exception_handler


def _transfer(params: Any, client: Any) -> dict[str, Any] | None:
    """A placeholder's ``kv_transfer_params``; None: the other engine need not hear of this refusal. P's own may be what
    is refused, or name a turn that D is to keep.
    """
    transfer = client.vllm_config.kv_transfer_config
    if not isinstance(params, dict) or transfer is None or not any(connectors_in(vars(transfer))):
        return None
    if not is_pushed(params):
        return dict(params) if params.get("do_remote_prefill") is True else None
    named = {TRANSFER: params[TRANSFER]} if isinstance(params.get(TRANSFER), str) else {}
    return {"do_remote_decode": True, "do_remote_prefill": False, **named}


def _names(get: Callable[[str], Any], raw_request: Any) -> Iterator[str]:
    """vLLM's names of a body's requests, one for each prompt and answer. ``get`` returns a value of the body."""
    from vllm.utils import random_uuid

    own = get("request_id")
    own = own if isinstance(own, str) else random_uuid()
    base = own if raw_request is None else raw_request.headers.get("X-Request-Id", own)
    count, prompt = get("n"), get("prompt")
    if get("messages") is not None:
        names = [f"chatcmpl-{base}"]
    elif get("input") is not None:
        names = [f"{own}_0"]
    elif get("token_ids") is not None:
        names, count = [f"generate-tokens-{base}"], _get(get("sampling_params"), "n")
    else:
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        names = [f"cmpl-{base}-{index}" for index in range(min(len(prompt), MOST) if several else 1)]
    return itertools.chain.from_iterable(_answers(name, count) for name in names)


def _answers(name: str, count: Any) -> Iterable[str]:
    """vLLM's names of so many answers to a prompt."""
    if not isinstance(count, int) or count <= 1:
        return [name]
    return [f"{answer}_{name}" for answer in range(min(count, MOST))]


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


async def _report(client: Any, names: Iterable[str], transfer: dict[str, Any], rank: int | None) -> None:
    from vllm.utils import random_uuid

    given = _given.get()
    for name in itertools.islice(names, MOST):
        if given is not None:
            given.add(name)
        try:  # the suffix is as that of a request that is not refused
            await client.notify_kv_transfer_request_rejected(
                f"{name}-{random_uuid():.8}", transfer, data_parallel_rank=rank
            )
        except Exception as error:  # noqa: BLE001  the client gets its answer; the other engine waits for a deadline
            logger.warning("layerpush: the refusal of request %s is not reported: %s", name, error)
            return
