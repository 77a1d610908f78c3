"""Each kind of KV cache: its blocks, what a token attends to, and what is transferred."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from layerpush.apps.estimate.model import model_of
from layerpush.compat.cache_layout import drafted_states
from layerpush.compat.kinds import KINDS, CacheKinds, UnknownKindError, has_states, kind_of
from layerpush.core.kv_kind import WHOLE_PROMPT

HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
STATE: dict[str, Any] = {"block_size": 512, "shapes": ((4, 4),), "dtypes": (torch.float16,)}


class Case(NamedTuple):
    """``attended``: the first position that the token at 100 attends to. ``sent``: what is transferred of 1, 2, 3."""

    spec: KVCacheSpec
    block_tokens: int = 16
    attended: int = 0
    sent: tuple[int, ...] = (1, 2, 3)
    is_state: bool = False


CASES: Mapping[type[KVCacheSpec], Case] = {
    FullAttentionSpec: Case(FullAttentionSpec(**HEADS)),
    MLAAttentionSpec: Case(MLAAttentionSpec(**HEADS)),
    SlidingWindowSpec: Case(SlidingWindowSpec(**HEADS, sliding_window=20), attended=81),
    SlidingWindowMLASpec: Case(SlidingWindowMLASpec(**HEADS, sliding_window=20), attended=81),
    ChunkedLocalAttentionSpec: Case(ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64), attended=64),
    CrossAttentionSpec: Case(CrossAttentionSpec(**HEADS)),
    EncoderOnlyAttentionSpec: Case(EncoderOnlyAttentionSpec(**HEADS)),
    MambaSpec: Case(MambaSpec(**STATE), WHOLE_PROMPT, sent=(3,), is_state=True),
    CircularBufferSpec: Case(CircularBufferSpec(**HEADS)),
    HiSparseHotSpec: Case(HiSparseHotSpec(block_size=16, page_size=64, blocks_per_request=2)),
    HiSparseResidentSpec: Case(HiSparseResidentSpec(block_size=16, page_size=64)),
}


def config_of(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(8, [], [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)])


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: spec.__name__)
def test_a_kind_has_its_blocks_and_its_attention(spec: type[KVCacheSpec]) -> None:
    case = CASES[spec]
    kind = kind_of(case.spec)
    assert kind.block_tokens == case.block_tokens
    assert kind.first_attended(100) == case.attended
    assert tuple(kind.transfer_blocks([1, 2, 3])) == case.sent
    assert kind.is_state == case.is_state
    assert (CacheKinds(config_of(case.spec)).never_gathered() is not None) == case.is_state
    assert has_states(config_of(case.spec)) == case.is_state


@pytest.mark.parametrize(
    ("spec", "first", "after"),
    [
        (SlidingWindowSpec(**HEADS, sliding_window=17), 3, 4),
        (SlidingWindowSpec(**HEADS, sliding_window=20), 3, 3),
        (ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=80), 0, 5),
        (FullAttentionSpec(**HEADS), 0, 0),
    ],
)
def test_the_next_token_drops_the_blocks_that_it_does_not_attend_to(spec: KVCacheSpec, first: int, after: int) -> None:
    assert kind_of(spec).blocks_dropped_after(80) == range(first, after)


def test_blocks_of_a_window_behind_the_prompt_are_seen() -> None:
    kinds = CacheKinds(config_of(FullAttentionSpec(**HEADS), SlidingWindowSpec(**HEADS, sliding_window=17)))
    blocks = -(-80 // kinds.block_sizes[0])
    table, longer = list(range(blocks)), list(range(blocks + 1))
    assert kinds.end_with_prompt([longer, table], 80), "of full attention all blocks are transferred, from the first on"
    assert not kinds.end_with_prompt([table, longer], 80)


def test_a_decode_engine_loads_one_token_less_where_vllm_would_drop_a_block_of_the_last() -> None:
    full, window = FullAttentionSpec(**HEADS), SlidingWindowSpec(**HEADS, sliding_window=17)
    assert CacheKinds(config_of(full)).tokens_to_load(80) == 80
    assert CacheKinds(config_of(full, window)).tokens_to_load(79) == 79
    assert CacheKinds(config_of(full, window)).tokens_to_load(80) == 79
    chunked = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=49)
    assert CacheKinds(config_of(full, chunked)).tokens_to_load(49) == 0


def test_a_load_takes_at_least_the_blocks_that_are_not_cached_and_that_its_next_token_attends_to() -> None:
    full, window = FullAttentionSpec(**HEADS), SlidingWindowSpec(**HEADS, sliding_window=17)
    assert CacheKinds(config_of(full)).blocks_to_load(80, 0) == 5
    assert CacheKinds(config_of(full)).blocks_to_load(81, 32) == 4
    assert CacheKinds(config_of(full, window)).blocks_to_load(80, 0) == 5 + 1
    assert CacheKinds(config_of(full, window)).blocks_to_load(81, 80) == 1 + 1


def test_a_state_belongs_to_every_token_and_a_block_to_its_own() -> None:
    assert kind_of(MambaSpec(**STATE)).blocks_between([7], 20, 40) == [7]
    assert kind_of(FullAttentionSpec(**HEADS)).blocks_between([5, 6, 7, 8], 20, 40) == [6, 7]


def test_states_of_drafts_are_not_transferred() -> None:
    spec = MambaSpec(**STATE, num_speculative_blocks=2)
    assert kind_of(spec).transfer_blocks([1, 2, 3]) == [1]
    kinds = CacheKinds(config_of(FullAttentionSpec(**HEADS), spec))
    assert kinds.transfer_tables([[4, 5], [1, 2, 3]]) == [[4, 5], [1]]


@pytest.mark.parametrize(("speculative", "late"), [(None, set()), (object(), {"state"})])
def test_states_follow_the_drafter(speculative: object | None, late: set[str]) -> None:
    """vLLM may copy a state once it has sampled."""
    specs = {"attention": FullAttentionSpec(**HEADS), "state": MambaSpec(**STATE)}
    worker: Any = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=speculative), _layer_specs=specs)
    assert drafted_states(worker) == late


def test_groups_that_are_not_transferred_have_no_table() -> None:
    config = config_of(FullAttentionSpec(**HEADS), SlidingWindowSpec(**HEADS, sliding_window=17))
    config.kv_cache_groups[0].enable_kv_transfer = False
    kinds = CacheKinds(config)
    assert (len(kinds.all), len(kinds.transferred)) == (2, 1)
    assert kinds.transfer_tables([[4, 5], [1, 2]]) == [[1, 2]]
    assert kinds.blocks_dropped_after(80) == [range(0), range(3, 4)]


def test_a_subclass_and_layers_of_one_type_have_the_row_of_their_kind() -> None:
    assert kind_of(SinkFullAttentionSpec(**HEADS, sink_len=4)).block_tokens == 16
    window = SlidingWindowSpec(**HEADS, sliding_window=20)
    several = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": window, "b": window})
    assert kind_of(several).first_attended(100) == 81


def test_an_unknown_kind_is_refused_by_name_and_with_a_remedy() -> None:
    class FooSpec(KVCacheSpec):
        pass

    group = SimpleNamespace(kv_cache_spec=FooSpec(block_size=16))
    with pytest.raises(UnknownKindError, match=r"FooSpec: use vLLM's NixlPushConnector.* or add a row .*kinds\.py"):
        CacheKinds(SimpleNamespace(kv_cache_groups=[group], transfer_groups=[group]))


@pytest.mark.parametrize(
    ("name", "spec", "ranks"),
    [
        ("llama-3.1-8b", FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16), 4),
        ("llama-3.1-8b", FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=128, dtype=torch.bfloat16), 16),
        ("deepseek-v3", MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16), 8),
    ],
)
def test_estimates_count_the_bytes_of_a_page_as_vllm_does(name: str, spec: KVCacheSpec, ranks: int) -> None:
    assert 16 * model_of(name).rank_bytes(ranks) == spec.page_size_bytes
