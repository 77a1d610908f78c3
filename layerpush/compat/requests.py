"""What vLLM's schedulers know of a request, and what they stage for it."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class StagedRegistration:
    """``message`` may be extended until the step's metadata is built; ``blocks`` are those that it names."""

    message: dict[str, Any]
    blocks: list[KVCacheBlock]


def is_streamed(request: Any) -> bool:
    """Whether a vLLM request is to be pushed from this engine."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))


def registration_timeout(scheduler: NixlPushConnectorScheduler) -> float:
    """Seconds that a decode engine waits for a push, upstream's ``push_registration_timeout``."""
    return float(scheduler._push_registration_timeout)


def take_staged_registration(
    scheduler: NixlPushConnectorScheduler, request_id: str, blocks: KVCacheBlocks
) -> StagedRegistration | None:
    """A registration that upstream has just staged for these blocks, once for each; None when it staged none.

    Upstream's own watch over it ends here: it would only log, and forget the request.
    """
    if scheduler._push_registration_deadlines.pop(request_id, None) is None:
        return None
    message = scheduler._push_pending_registrations[request_id]
    tables = scheduler.kv_cache_config.select_transfer_block_ids(blocks.blocks)
    registered = [
        block
        for ids, table in zip(map(set, message["local_block_ids"]), tables, strict=True)
        for block in table
        if block.block_id in ids and not block.is_null
    ]
    return StagedRegistration(message, registered)


def prompt_digest(scheduler: NixlPushConnectorScheduler, request: Request) -> str | None:
    """Equal on both sides of a push for equal prompts; None where that cannot be said."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None or scheduler._prefill_backoff():
        return None
    digest = hashlib.blake2b(array("i", request.prompt_token_ids).tobytes(), digest_size=16)
    adapter = request.lora_request.lora_name if request.lora_request else ""
    for name in (adapter, *(feature.identifier for feature in request.mm_features)):
        digest.update(b"\0" + name.encode())
    return digest.hexdigest()


def awaits_scheduling(request: Any) -> bool:
    """Whether a decode engine has not come to registering this request's blocks."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def withdraw_receive(scheduler: NixlPushConnectorScheduler, request_id: str) -> None:
    """Workers shall not await what nobody was asked for: upstream's would, for ever."""
    scheduler._reqs_need_recv.pop(request_id, None)
