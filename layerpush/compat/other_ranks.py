"""Reports to P's other data-parallel ranks which rank has a request, so that they refuse registrations for it at once.

One API server may serve several ranks, and chooses one for each request. A router that asks P and D at the same time
has to guess that rank, and D registers with the guessed one. So when the front end has sent a request to a rank, it
calls a utility of vLLM's engine core on each other rank. There the connector's scheduler reports it to its workers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from layerpush.compat.admission import pushed_params
from layerpush.compat.patches import our_connectors
from layerpush.core.transfer_config import connectors_in

UTILITY = "layerpush_rank_is_other"

logger = logging.getLogger(f"vllm.{__name__}")


_calls: set[asyncio.Task[None]] = set()


def notifying(plain: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """``add_request_async`` of the front end's client of several engine cores."""

    @functools.wraps(plain)
    async def add_request_async(client: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        await plain(client, request, *args, **kwargs)
        if pushed_params(request.sampling_params) is not None and _is_ours(client):
            _notify(client, request.request_id)

    return add_request_async


def _notify(client: Any, request_id: str) -> None:
    chosen = client.reqs_in_flight.get(request_id)
    if chosen is None:
        return  # it has ended
    rank = client.core_engines.index(chosen)
    for engine in client.core_engines:
        if engine != chosen:
            call = asyncio.create_task(_call(client, engine, request_id, rank))
            _calls.add(call)
            call.add_done_callback(_calls.discard)


def _is_ours(client: Any) -> bool:
    transfer = client.vllm_config.kv_transfer_config
    return transfer is not None and any(connectors_in(vars(transfer)))


async def _call(client: Any, engine: Any, request_id: str, rank: int) -> None:
    try:
        await client._call_utility_async(UTILITY, request_id, rank, engine=engine)
    except Exception as error:  # noqa: BLE001  D then waits a little longer; the request itself is served
        logger.debug("layerpush: a rank got no notice of request %s: %s", request_id, error)


def notice_receiver(_: None) -> Callable[[Any, str, int], None]:
    """A new method of vLLM's ``EngineCore``, ``UTILITY``."""

    def rank_is_other(core: Any, request_id: str, rank: int) -> None:
        """A request was sent to another data-parallel ``rank`` of this engine. Engine core's thread."""
        for each, _ in our_connectors(core.scheduler.connector):
            each.connector_scheduler.rank_is_other(request_id, rank)

    return rank_is_other
