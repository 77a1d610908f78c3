"""A KV store in an engine's memory, as another connector beside layerpush. It can lose blocks.

It saves the full blocks of each request that ends well, and loads them for later prompts, in one of three ways:
``sync`` copies before the step's forward, ``layer`` copies each layer before its attention, ``async`` copies while the
request waits. A block that is lost is overwritten with garbage, and reported as vLLM asks for it. The store forgets it.

The scheduler's and the worker's side are in one process, and share ``STORE``. All functions run on the engine's thread.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.request import RequestStatus

from tests.e2e.enginespec import BLOCK_SIZE

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from tests.e2e.hostmain import HostedEngine

Way = Literal["sync", "layer", "async"]
MODULE = __name__
GARBAGE = 311.0
STEPS_OF_A_LOAD = 2
"""Engine steps that an asynchronous load takes."""


@dataclass
class Store:
    """``lose`` is the index, among the blocks of the next load that has so many, of a block that it loses. ``losses``
    is the part of other loads that lose a block, 0 to 1. Beyond ``capacity`` the oldest blocks go.
    """

    way: Way = "sync"
    lose: int | None = None
    losses: float = 0.0
    capacity: int = 256
    blocks: OrderedDict[str, dict[str, torch.Tensor]] = field(default_factory=OrderedDict)
    caches: dict[str, torch.Tensor] = field(default_factory=dict)
    loaded: int = 0
    lost: int = 0

    def loses(self, blocks: int) -> int | None:
        """The index of the block that a load of so many loses."""
        if self.lose is not None and self.lose < blocks:
            index, self.lose = self.lose, None
            return index
        return random.randrange(blocks) if random.random() < self.losses else None


STORE = Store()


@dataclass
class Load:
    """Blocks of one request: the store's key and the KV cache's block of each, and which of them is lost."""

    request_id: str
    blocks: list[tuple[str, int]]
    lost: int | None
    steps_left: int = STEPS_OF_A_LOAD


@dataclass
class Loads(KVConnectorMetadata):
    loads: list[Load]


class MemoryStore(KVConnectorBase_V1, SupportsHMA):
    """``kv_connector_extra_config`` may set ``way`` and ``losses``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hits: dict[str, int] = {}
        self._planned: list[Load] = []
        self._under_way: list[Load] = []
        self._errors: set[int] = set()
        extra = self._kv_transfer_config.kv_connector_extra_config
        STORE.way, STORE.losses = extra.get("way", "sync"), extra.get("losses", 0.0)

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        self._hits[request.request_id] = num_computed_tokens // BLOCK_SIZE
        found = 0
        for key in _keys(request.prompt_token_ids):
            if key not in STORE.blocks:
                break
            found += BLOCK_SIZE
        if found == request.num_prompt_tokens:
            found -= BLOCK_SIZE  # the engine has to compute a token
        tokens = max(0, found - num_computed_tokens)
        return tokens, tokens > 0 and STORE.way == "async"

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        first, count = self._hits[request.request_id], num_external_tokens // BLOCK_SIZE
        keys = _keys(request.prompt_token_ids)[first : first + count]
        table = blocks.get_block_ids()[0][first : first + count]
        lost = STORE.loses(count)
        self._planned.append(Load(request.request_id, list(zip(keys, table, strict=True)), lost))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        planned, self._planned = self._planned, []
        return Loads(planned)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self._hits.pop(request.request_id, None)
        if request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            for key, block in zip(_keys(request.prompt_token_ids), block_ids, strict=False):
                if key not in STORE.blocks:
                    STORE.blocks[key] = {name: cache[block].clone() for name, cache in STORE.caches.items()}
            while len(STORE.blocks) > STORE.capacity:
                STORE.blocks.popitem(last=False)
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        STORE.caches = kv_caches
        if self._kv_transfer_config.kv_connector_extra_config.get("steps_in_flight"):
            # vLLM turns it off on a CPU. The scheduler and the queue of steps are built next, and read it.
            self._vllm_config.scheduler_config.async_scheduling = True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        self._under_way += metadata.loads
        if STORE.way == "sync":
            for load in self._under_way:
                for name in STORE.caches:
                    self._copy(load, name)
                self._end(load)
            self._under_way = []

    def wait_for_layer_load(self, layer_name: str) -> None:
        if STORE.way == "layer":
            for load in self._under_way:
                self._copy(load, layer_name)

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        if STORE.way == "layer":
            for load in self._under_way:
                self._end(load)
            self._under_way = []

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        if STORE.way != "async":
            return None, None
        for load in self._under_way:
            load.steps_left -= 1
        done = [load for load in self._under_way if not load.steps_left]
        self._under_way = [load for load in self._under_way if load.steps_left]
        for load in done:
            for name in STORE.caches:
                self._copy(load, name)
            self._end(load)
        return None, {load.request_id for load in done} or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._errors = self._errors, set()
        return errors

    def _copy(self, load: Load, layer: str) -> None:
        for index, (key, block) in enumerate(load.blocks):
            saved = STORE.blocks.get(key)
            if index == load.lost or saved is None:
                STORE.caches[layer][block].fill_(GARBAGE)
            else:
                STORE.caches[layer][block].copy_(saved[layer])

    def _end(self, load: Load) -> None:
        STORE.loaded += len(load.blocks)
        for index, (key, block) in enumerate(load.blocks):
            if index == load.lost or key not in STORE.blocks:
                STORE.blocks.pop(key, None)
                STORE.lost += 1
                self._errors.add(block)


def _keys(token_ids: list[int]) -> list[str]:
    """A key for each full block of a prompt: equal for equal tokens up to the block's end."""
    digest, keys = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        digest.update(array("i", token_ids[start : start + BLOCK_SIZE]).tobytes())
        keys.append(digest.hexdigest())
    return keys


# Functions for ``EngineHost.call``.


def begin(host: HostedEngine, way: Way, policy: Literal["recompute", "fail"]) -> None:
    """Empty the store and the prefix cache; load this way; ``policy`` is the engine's kv_load_failure_policy."""
    STORE.way, STORE.lose = way, None
    STORE.loaded = STORE.lost = 0
    STORE.blocks.clear()
    assert host.llm.reset_prefix_cache()
    host.scheduler.recompute_kv_load_failures = policy == "recompute"


def lose(host: HostedEngine, index: int) -> None:
    """The next load of more than ``index`` blocks loses that block. The prefix cache forgets everything."""
    STORE.lose = index
    assert host.llm.reset_prefix_cache()


def counts(host: HostedEngine) -> tuple[int, int]:
    """The blocks that were loaded since ``begin``, lost ones included, and the lost ones."""
    return STORE.loaded, STORE.lost
