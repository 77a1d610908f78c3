"""The kinds of KV cache: one row for each. Whatever depends on the kind of a cache asks its row.

A new kind is one row of ``KINDS`` and one case of ``tests/unit/test_kinds.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import clip_ssm_state_blocks
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from layerpush.core.kv_kind import WHOLE_PROMPT, KvKind, Ranks, in_chunk, in_window

WINDOW = "`sliding_window` - 1 tokens before it"
HOOK, WHOLE = "when its hook is called", "never: the engine pushes whole requests"


class UnknownKindError(ValueError):
    """A KV cache has no row. The text names its class and the remedy."""


def _full(spec: Any, ranks: Ranks | None = None) -> KvKind:
    return KvKind(spec.block_size, ranks=ranks)


def _window(spec: Any, ranks: Ranks) -> KvKind:
    return KvKind(spec.block_size, first_attended=in_window(int(spec.sliding_window)), ranks=ranks)


def _chunked(spec: Any) -> KvKind:
    return KvKind(spec.block_size, first_attended=in_chunk(int(spec.attention_chunk_size)), ranks="heads")


def _state(spec: Any) -> KvKind:
    """vLLM transfers the newest state only. The others are in the prefix cache, are null, or are for drafts."""
    return KvKind(
        WHOLE_PROMPT,
        is_state=True,
        transfer_blocks=partial(clip_ssm_state_blocks, num_spec_blocks=spec.num_speculative_blocks),
        never_gathered="the model has layers with a state",
    )


@dataclass(frozen=True)
class Row:
    """A kind of KV cache: ``make`` builds a group's ``KvKind`` from vLLM's specification; the rest is for the page."""

    name: str
    make: Callable[[Any], KvKind]
    block: str = "`block_size` tokens"
    attended: str = "the first token"
    transferred: str = "all"
    ready: str = HOOK


KINDS: Mapping[type[KVCacheSpec], Row] = {
    FullAttentionSpec: Row("full attention", partial(_full, ranks="heads")),
    MLAAttentionSpec: Row("MLA, and its indexer", partial(_full, ranks="same")),
    SlidingWindowSpec: Row("sliding window", partial(_window, ranks="heads"), attended=WINDOW),
    SlidingWindowMLASpec: Row("MLA with a sliding window", partial(_window, ranks="same"), attended=WINDOW),
    ChunkedLocalAttentionSpec: Row("chunked local attention", _chunked, attended="the first token of its chunk"),
    CrossAttentionSpec: Row("cross attention", _full, ready="not tested"),
    EncoderOnlyAttentionSpec: Row("attention of an encoder", _full, ready="not tested"),
    MambaSpec: Row(
        "state (Mamba, GDN)",
        _state,
        block="the whole prompt",
        attended="does not apply",
        transferred="the newest",
        ready="when the prompt's last step has ended",
    ),
    CircularBufferSpec: Row("circular buffer", _full, ready=WHOLE),
    HiSparseHotSpec: Row("HiSparse, hot", _full, ready=WHOLE),
    HiSparseResidentSpec: Row("HiSparse, resident", _full, ready=WHOLE),
}
"""By vLLM's class. A subclass without a row has that of its nearest ancestor."""


def kinds_of(spec: KVCacheSpec) -> list[KvKind]:
    """The kinds of all layers of a group. Raises ``UnknownKindError``."""
    layers = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return [kind_of(layer) for layer in layers]


def kind_of(spec: KVCacheSpec) -> KvKind:
    """The kind of a KV cache. Raises ``UnknownKindError``."""
    first = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    for ancestor in type(first).__mro__:
        if (row := KINDS.get(ancestor)) is not None:
            return row.make(first)
    raise UnknownKindError(
        f"layerpush does not know the KV cache of {type(first).__module__}.{type(first).__qualname__}: use vLLM's "
        "NixlPushConnector for this model, or add a row for this class to KINDS in layerpush/compat/kinds.py"
    )


def has_states(kv_cache_config: Any) -> bool:
    """Whether a layer has a state (Mamba, GDN) in place of KV."""
    return any(kind.is_state for kind in CacheKinds(kv_cache_config).transferred)


class CacheKinds:
    """The kinds of an engine's KV cache groups: ``all`` of them, and those that are ``transferred``.

    Raises ``UnknownKindError``.
    """

    def __init__(self, kv_cache_config: Any) -> None:
        self._config = kv_cache_config
        self.all = tuple(kind_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)
        self.transferred = tuple(kind_of(group.kv_cache_spec) for group in kv_cache_config.transfer_groups)
        self.block_sizes = tuple(kind.block_tokens for kind in self.transferred)

    def never_gathered(self) -> str | None:
        """The reason why WRITEs of these caches are never gathered, or None."""
        return next((kind.never_gathered for kind in self.transferred if kind.never_gathered is not None), None)

    def transfer_tables(self, tables: Sequence[list[int]]) -> list[list[int]]:
        """A request's block ids in token order that are transferred, for each transferred group.

        ``tables`` has those of all groups.
        """
        selected = self._config.select_transfer_block_ids(tables)
        return [kind.transfer_blocks(table) for kind, table in zip(self.transferred, selected, strict=True)]

    def end_with_prompt(self, tables: Sequence[Sequence[int]], tokens: int) -> bool:
        """Whether no block of a group with a window lies behind a prompt of ``tokens``. vLLM transfers the last blocks
        of such a group. ``tables`` has a request's block ids of all groups.
        """
        return not any(
            kind.has_window and len(table) > -(-tokens // kind.block_tokens)
            for kind, table in zip(self.all, tables, strict=True)
        )

    def blocks_dropped_after(self, tokens: int) -> list[range]:
        """For each of all groups, the indices of the blocks that the last of a prompt's tokens attends to, and the
        token after it does not.
        """
        return [kind.blocks_dropped_after(tokens) for kind in self.all]

    @property
    def growing(self) -> int:
        """The number of groups in which a request needs further blocks as it grows."""
        return sum(not (kind.is_state or kind.has_window) for kind in self.all)

    def blocks_to_load(self, tokens: int, cached: int) -> int:
        """The least number of blocks, of all groups, that a load of ``tokens`` takes if ``cached`` are there."""
        number = 0
        for kind in self.all:
            first = max(cached, kind.first_attended(tokens))
            number += 1 if kind.is_state else max(0, -(-tokens // kind.block_tokens) - first // kind.block_tokens)
        return number

    def tokens_to_load(self, tokens: int) -> int:
        """How many of a prompt's tokens a decode engine loads. It may compute the last one again, to sample from it.

        vLLM allocates the blocks of a load for the token that follows. If the last token attends to a block that vLLM
        drops then, the engine loads all tokens but the last one. P's blocks are the same. 0: they would not be the
        same, and the engine computes the prompt itself.
        """
        if not any(self.blocks_dropped_after(tokens)):
            return tokens
        return 0 if any((tokens - 1) % size == 0 for size in self.block_sizes) else tokens - 1
