"""Reports to P's other data-parallel ranks which rank has a request, so that they refuse registrations for it at once.

One API server may serve several ranks, and chooses one for each request. A router that asks P and D at the same time
has to guess that rank, and D registers with the guessed one. So when the front end has sent a request to a rank, it
calls a utility of vLLM's engine core on each other rank. There the connector's scheduler reports it to its workers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from types import ModuleType
from typing import Any

from layerpush.compat.admission import connectors_in
from layerpush.compat.early_answer import streamed
from layerpush.compat.import_hook import ImportHook

CLIENT = "vllm.v1.engine.core_client"
CORE = "vllm.v1.engine.core"
UTILITY = "layerpush_went_elsewhere"

logger = logging.getLogger(f"vllm.{__name__}")


class OtherRanks(ImportHook):
    """Patches the front end's client of several engine cores, and the core."""

    names = frozenset({CLIENT, CORE})

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[None]] = set()

    def patch(self, module: ModuleType) -> None:
        if module.__name__ == CORE:
            module.EngineCore.layerpush_went_elsewhere = went_elsewhere
            return
        client: Any = getattr(module, "DPLBAsyncMPClient", None)
        plain: Any = getattr(client, "add_request_async", None)
        if plain is None:
            logger.warning("%s.DPLBAsyncMPClient does not exist in this vLLM: ranks get no notice of requests", CLIENT)
            return

        @functools.wraps(plain)
        async def add_request_async(client: Any, request: Any) -> None:
            await plain(client, request)
            if streamed(request.sampling_params) is not None and _is_ours(client):
                self._notify(client, request.request_id)

        client.add_request_async = add_request_async

    def _notify(self, client: Any, request_id: str) -> None:
        chosen = client.reqs_in_flight.get(request_id)
        if chosen is None:
            return  # it has ended
        rank = client.core_engines.index(chosen)
        for engine in client.core_engines:
            if engine != chosen:
                call = asyncio.create_task(_call(client, engine, request_id, rank))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)


def _is_ours(client: Any) -> bool:
    transfer = client.vllm_config.kv_transfer_config
    return transfer is not None and any(connectors_in(vars(transfer)))


async def _call(client: Any, engine: Any, request_id: str, rank: int) -> None:
    try:
        await client._call_utility_async(UTILITY, request_id, rank, engine=engine)
    except Exception as error:  # noqa: BLE001  D then waits a little longer; the request itself is served
        logger.debug("layerpush: a rank got no notice of request %s: %s", request_id, error)


def went_elsewhere(core: Any, request_id: str, rank: int) -> None:
    """A request was sent to the data-parallel ``rank`` of this engine, another one than this. Engine core's thread."""
    connector = core.scheduler.connector
    for each in getattr(connector, "_connectors", (connector,)):
        note = getattr(getattr(each, "connector_scheduler", None), "went_elsewhere", None)
        if note is not None:
            note(request_id, rank)
