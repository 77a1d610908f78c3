"""vLLM's push scheduler with public names for its internals, so that no other folder uses vLLM's private names."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.v1.request import RequestStatus
from vllm.v1.utils import tensor_data

from layerpush.compat.first_tokens import sampling_of
from layerpush.compat.kinds import CacheKinds
from layerpush.compat.nixl_connector import get_base_request_id
from layerpush.compat.patches import VARIABLE, is_on
from layerpush.core.first_token import Sampled
from layerpush.core.prefixes import Prefixes, key_of
from layerpush.core.request_names import named_prompts
from layerpush.core.request_params import PREFIXES, TRUNCATED, is_pushed, transfer_id

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class StagedRegistration:
    """A registration that leaves with the step's metadata.

    ``message`` may be extended until that metadata is built. ``blocks`` are the blocks that it names.
    """

    message: dict[str, Any]
    blocks: list[KVCacheBlock]


class VllmPushScheduler(NixlPushConnectorScheduler, ABC):
    """Every method runs in the scheduler's thread."""

    is_bidirectional_kv_xfer_enabled: Any = property(lambda _: False, lambda _, __: None)
    """vLLM's own scheduler refuses to push with it. ``LayerPushConfig`` has the setting."""

    @abstractmethod
    def open_side_channel(self, host: str, port: int) -> Callable[..., None]:
        """Listen on the side channel's port. Returns the function that vLLM runs on a thread of its own, with its
        encoded answers, two events and the address. An exception ends the engine's start.
        """

    @property
    def _nixl_handshake_listener(self) -> Callable[..., None]:
        """vLLM reads this once, on the main thread. Then it waits without a deadline for its own thread, so the port
        must be bound before.
        """
        return self.open_side_channel(self.side_channel_host, self.side_channel_port)

    @property
    def registration_timeout(self) -> float:
        """Seconds that a decode engine waits for a push, vLLM's ``push_registration_timeout``."""
        return float(self._push_registration_timeout)

    def take_staged_registration(self, request_id: str, blocks: KVCacheBlocks) -> StagedRegistration | None:
        """The registration that vLLM has just staged for these blocks, once for each; None if it staged none.

        This removes vLLM's own deadline for it. At that deadline vLLM would only log a line and forget the request.
        """
        if self._push_registration_deadlines.pop(request_id, None) is None:
            return None
        message = self._push_pending_registrations[request_id]
        tables = self.kv_cache_config.select_transfer_block_ids(blocks.blocks)
        registered = [
            block
            for ids, table in zip(map(set, message["local_block_ids"]), tables, strict=True)
            for block in table
            if block.block_id in ids and not block.is_null
        ]
        return StagedRegistration(message, registered)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """``get_num_new_matched_tokens``; vLLM's finds no tokens of a prompt that is given as embeddings."""
        if request.prompt_token_ids is not None or not lacks_registration(request):
            found: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return found
        whole, backoff = request.num_prompt_tokens, self._prefill_backoff()
        tokens = (whole - backoff if whole > backoff else whole) - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def forget_receive(self, request: Request) -> None:
        """A request will not be registered: send P no heartbeats for it."""
        request.kv_transfer_params["do_remote_prefill"] = False
        self._stop_heartbeat(request.request_id)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's answer; but a request with a part of its prompt not computed ends as an aborted one, with any status.

        vLLM may end a request with the token of a step that it has taken back.
        """
        if is_pushed(request.kv_transfer_params) and request.num_computed_tokens < request.num_prompt_tokens:
            self._stop_heartbeat(request.request_id)
            self._reqs_need_save.pop(request.request_id, None)
            self._reqs_not_processed.add(request.request_id)
            return False, None
        outcome: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return outcome

    def returns_refusal(self) -> str | None:
        """The reason why this engine neither keeps turns nor loads them; None if there is none."""
        if any(kind.is_state or kind.has_window for kind in CacheKinds(self.kv_cache_config).all):
            return "the model has layers with windows or states"
        if self.vllm_config.speculative_config is not None:
            return "a drafter may not have seen the last tokens of an answer"
        if self.use_host_buffer:
            return "the KV cache is staged in a host buffer (kv_buffer_device=cpu)"
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            return "no engine can write to a stage of a pipeline"
        return None if is_on("failed-loads") else f"{VARIABLE} leaves out failed-loads"

    def prefixes_of(self, request: Request, tokens: int, stride: int) -> Prefixes | None:
        """Digests of the request's first ``tokens`` tokens. None: there is more to its prompt than tokens."""
        if request.prompt_embeds is not None or request.mm_features:
            return None
        adapter = request.lora_request.lora_name if request.lora_request else ""
        return Prefixes.of(request.all_token_ids[:tokens], stride, adapter, request.cache_salt)

    def stage_return(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """P's request loads ``tokens`` tokens from a decode engine: stage the registration as a decode engine does."""
        params = request.kv_transfer_params
        request.kv_transfer_params = {**params, "do_remote_prefill": True, "do_remote_decode": False}
        try:
            super().update_state_after_alloc(request, blocks, tokens)
        finally:  # the workers get these params: they need no block ids, and a client may have sent anything
            request.kv_transfer_params = {**params, "remote_block_ids": ()}

    def keep_turn(self, request: Request, blocks: Any, tokens: int, shown: str) -> dict[str, Any]:
        """D's request has ended: hold these ``blocks``, with the KV of its first ``tokens`` tokens, for vLLM's
        ``decoder_kv_blocks_ttl``. Returns the params that its next turn brings to P, as vLLM's pull connector does.
        """
        request_id, parallel = request.request_id, self.vllm_config.parallel_config
        self._reqs_in_batch.add(request_id)
        self._reqs_need_send[request_id] = time.perf_counter() + float(self.decoder_kv_blocks_ttl)
        self._newly_finished_push_blocks[request_id] = blocks
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": blocks,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "tp_size": self.transfer_tp_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": self._reqs_need_send[request_id],
            "transfer_mode": self._TRANSFER_MODE,
            PREFIXES: shown,
        }

    def release_turn(self, request_id: str) -> None:
        """End the time of a kept turn. A WRITE that reads it ends first."""
        self._reqs_need_send[request_id] = time.perf_counter()

    def cancel_receive(self, request_id: str) -> None:
        """Drop a receive that was never registered: vLLM's workers would wait for it forever."""
        self._reqs_need_recv.pop(request_id, None)

    @property
    def prefill_backoff(self) -> int:
        """How many tokens of a prompt P leaves to D, because of the model."""
        return int(self._prefill_backoff())

    def sampled_token(self, request: Request) -> Sampled | None:
        """The first token that P has sampled after the whole prompt; None if P has sampled none."""
        if self._prefill_backoff() or not request.output_token_ids or request.sampling_params is None:
            return None
        return Sampled(request.output_token_ids[0], *sampling_of(request.sampling_params))

    def prompt_names(self, request: Request) -> set[str]:
        """The names by which P may know the prompt of a request that awaits scheduling: see ``named_prompts``."""
        params = request.kv_transfer_params
        bases = map(get_base_request_id, {request.request_id, params["remote_request_id"]})
        return named_prompts([*bases, transfer_id(params)], self.prompt_digest(request))

    def prompt_digest(self, request: Request) -> str | None:
        """A digest, 32 hexadecimal digits, equal on P and D for equal prompts: their tokens, embeddings, adapter, other
        inputs, and ``cache_salt``. None if P and D cannot compare them: without a prefix cache and a cache of processed
        inputs, vLLM numbers inputs and hashes none. A request that the front end has refused has a placeholder as its
        prompt.

        P may have dropped the last tokens, which it leaves to D: the digest counts them, and leaves out their ids.
        """
        tokens, embeddings, backoff = request.prompt_token_ids or [], request.prompt_embeds, self._prefill_backoff()
        if (embeddings is not None and backoff) or (request.mm_features and not self._hashes_inputs):
            return None
        if request.abort_immediately:
            return None
        dropped = backoff if (request.kv_transfer_params or {}).get(TRUNCATED) else 0
        whole = len(tokens) + dropped
        kept = tokens[: whole - backoff] if whole > backoff > 0 else tokens
        digest = hashlib.blake2b(array("i", kept).tobytes(), digest_size=16, key=key_of(request.cache_salt))
        if backoff:
            digest.update(str(whole).encode())
        if embeddings is not None:
            digest.update(tensor_data(embeddings))
            digest.update(bytes(request.prompt_is_token_ids or ()))
        adapter = request.lora_request.lora_name if request.lora_request else ""
        for name in (adapter, *(feature.identifier for feature in request.mm_features)):
            digest.update(b"\0" + name.encode())
        return digest.hexdigest()

    @property
    def _hashes_inputs(self) -> bool:
        multimodal = self.vllm_config.model_config.multimodal_config
        hashed = multimodal is None or multimodal.mm_processor_cache_gb > 0
        return bool(hashed or self.vllm_config.cache_config.enable_prefix_caching)


def has_answer(request: Any) -> bool:
    """Whether a request that has ended has its whole answer."""
    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def lacks_registration(request: Any) -> bool:
    """Whether a decode engine has not registered this request's blocks yet."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def name_prefill_request(request: Any) -> None:
    """Fill in a missing ``remote_request_id``: P's request has the same id if the router sent both the same.

    If it has another, the params' ``transfer_id`` pairs the two.
    """
    params = request.kv_transfer_params
    if params.get("remote_request_id") is None:
        params["remote_request_id"] = get_base_request_id(request.request_id)
