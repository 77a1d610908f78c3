"""Runs inside an engine host: remembers block tables and takes digests of the prompt's KV at the right moments.

P: after the prompt's last step, before any later step can reuse its blocks.
D: after the load and before the first forward of the request, which would overwrite the last prompt slot.
Before an engine registers blocks, a pattern fills them: stale but equal bytes cannot pass for a transfer.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from tests.e2e.results import KvDigest

NULL_BLOCK = 0
"""vLLM's place holder in block tables."""
LATENT_CELL = 16
"""Tokens of a digest's cell of MLA, so that engines with other block sizes can be compared."""
POISON, POISON_BYTE = 31337.0, 0xA5
Tables = list[list[int]]


@dataclasses.dataclass(frozen=True)
class WatchedLayer:
    """One layer's cache. `window` is the number of tokens to which its attention looks back. None: all.

    Attention has one tensor. A layer with a state (Mamba, short convolution) has one for each part of the state. Its
    newest state lies in the block of the last token; a block there has `tokens_per_block` tokens.
    """

    cache: torch.Tensor | Sequence[torch.Tensor]
    group: int
    window: int | None
    tokens_per_block: int

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [self.cache] if isinstance(self.cache, torch.Tensor) else self.cache


def watched_layers(vllm_config: Any, kv_cache_config: Any) -> list[WatchedLayer]:
    """The layers in the order of the model."""
    context = vllm_config.compilation_config.static_forward_context
    group_of = {
        name: (number, getattr(group.kv_cache_spec, "sliding_window", None), group.kv_cache_spec.block_size)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
    caches = {
        name: _in_blocks(context[name].kv_cache, kv_cache_config.num_blocks) for name in context if name in group_of
    }
    return [WatchedLayer(cache, *group_of[name]) for name, cache in caches.items()]


def _in_blocks(cache: Any, blocks: int) -> Any:
    """The cache by the scheduler's blocks: the kernel may have smaller ones of MLA."""
    is_latent = isinstance(cache, torch.Tensor) and cache.ndim == 3
    return cache.view(blocks, -1, cache.shape[2]) if is_latent else cache


class KvWatch:
    """Watches one scheduler. All methods run on the host's main thread, between or inside engine steps."""

    def __init__(self, scheduler: Any, layers: list[WatchedLayer], block_size: int) -> None:
        self._scheduler = scheduler
        self._layers = layers
        self._block_size = block_size
        self._tables: dict[str, tuple[int, Tables]] = {}
        self._registered: dict[str, set[int]] = {}
        self.digests: dict[str, KvDigest] = {}
        self._schedule = scheduler.schedule
        scheduler.schedule = self._schedule_and_watch

    def after_step(self, finished: list[str]) -> None:
        """Take P's digests. `finished` are the internal ids of the requests that this step finished."""
        for request_id in finished:
            if (table := self._tables.pop(request_id, None)) is not None:
                self.digests[request_id] = self._digest(*table)
            self._registered.pop(request_id, None)

    def _schedule_and_watch(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        for request_id, request in self._scheduler.requests.items():
            params = request.kv_transfer_params or {}
            scheduled = request_id in output.num_scheduled_tokens
            if "remote_engine_id" in params and request.status.name == "WAITING_FOR_REMOTE_KVS":
                self._watch_load(request_id)
            elif params.get("do_remote_decode"):
                if scheduled:
                    self._tables[request_id] = (request.num_prompt_tokens, self._block_tables(request_id))
            elif "remote_engine_id" in params and scheduled:
                self._watch_decode(request_id, request)
        return output

    def _watch_load(self, request_id: str) -> None:
        if request_id not in self._registered and self._is_awaited(request_id):
            blocks = self._scheduler.kv_cache_manager.get_blocks(request_id).get_unhashed_block_ids_all_groups()
            self._registered[request_id] = {block for group in blocks for block in group}
            self._poison([[block for block in group if block != NULL_BLOCK] for group in blocks])

    def _watch_decode(self, request_id: str, request: Any) -> None:
        if request_id not in self.digests:
            tables = self._block_tables(request_id)
            registered = self._registered.get(request_id, set())
            # vLLM's P leaves a prompt's last token to D where a layer has a state, which cannot go back by one.
            tokens = request.num_prompt_tokens - any(
                not isinstance(layer.cache, torch.Tensor) for layer in self._layers
            )
            self.digests[request_id] = self._digest(tokens, tables, registered)

    def _is_awaited(self, request_id: str) -> bool:
        """Whether a push is awaited: another connector may load the prompt."""
        connector = self._scheduler.connector
        sides = [getattr(each, "connector_scheduler", None) for each in getattr(connector, "_connectors", [connector])]
        holds = [side.awaited.block_holds for side in sides if hasattr(side, "awaited")]
        return not holds or any(request_id in each for each in holds)  # a stock engine has no such table

    def _poison(self, blocks: Tables) -> None:
        for layer in self._layers:
            for tensor in layer.tensors:
                poison = POISON if tensor.is_floating_point() else POISON_BYTE  # fp8 is kept as bytes
                tensor[torch.tensor(blocks[layer.group], dtype=torch.long)] = poison

    def _block_tables(self, request_id: str) -> Tables:
        return [list(table) for table in self._scheduler.kv_cache_manager.get_block_ids(request_id)]

    def _digest(self, tokens: int, tables: Tables, only: set[int] | None = None) -> KvDigest:
        rows = (self._digest_layer(layer, tokens, tables[layer.group], only) for layer in self._layers)
        return KvDigest(tokens, tuple(rows))

    def _digest_layer(
        self, layer: WatchedLayer, tokens: int, table: list[int], only: set[int] | None
    ) -> tuple[bytes | None, ...]:
        """One cell per block, or per `LATENT_CELL` tokens of MLA. None for blocks behind the layer's window, for those
        not in `only`, and for those that an unfinished prompt does not have yet.
        """
        if not isinstance(layer.cache, torch.Tensor):
            newest = table[-(-tokens // layer.tokens_per_block) - 1]
            return (_hash(*(tensor[newest] for tensor in layer.cache)),)
        size = self._block_size
        cell = min(size, LATENT_CELL) if layer.cache.ndim == 3 else size
        first = 0 if layer.window is None else max(0, tokens - layer.window) // cell
        cells: list[bytes | None] = [None] * first
        token_axis = layer.cache.shape.index(size, 1)
        for at in range(first * cell, tokens, cell):
            block, start = divmod(at, size)
            if block >= len(table) or (only is not None and table[block] not in only):
                cells.append(None)
                continue
            slots = layer.cache[table[block]].movedim(token_axis - 1, 0)[: tokens - block * size]
            cells.append(_hash(slots[start : start + cell]))
        return tuple(cells)


def _hash(*tensors: torch.Tensor) -> bytes:
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.blake2b(data, digest_size=8).digest()
