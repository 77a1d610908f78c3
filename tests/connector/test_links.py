"""Whether a push between two engines can be right, by the facts of their handshake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerpush.core.replica import Replica
from layerpush.transport.base import Route


@pytest.mark.parametrize(
    ("kernel_block", "blocks", "ranks", "mamba", "stock", "reason"),
    [
        (16, 2, 2, False, True, None),
        (16, 2, 2, True, True, None),
        (16, 4, 2, False, False, None),
        (48, 1, 2, False, False, None),
        (32, 1, 2, False, False, None),
        (16, 4, 2, False, True, "its block size is 64 tokens, ours 32, and vLLM's push connector needs equal ones"),
        (32, 1, 2, False, True, "its kernels' block size is 32 tokens, ours 16, and vLLM's push connector needs equal"),
        (16, 1, 2, True, False, "its block size is 16 tokens, ours 32, and a model with Mamba layers needs equal ones"),
        (16, 2, 1, False, True, None),
    ],
)
def test_a_mismatch_of_two_engines_has_a_reason(
    kernel_block: int, blocks: int, ranks: int, mamba: bool, stock: bool, reason: str | None
) -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from layerpush.compat.links import mismatch
    from layerpush.compat.pieces import StridedEngine

    remote: Any = SimpleNamespace(
        remote_block_size=kernel_block, remote_physical_blocks_per_logical=blocks, remote_tp_size=ranks
    )
    if (kernel_block, blocks) != (16, 2):
        remote = StridedEngine(ranks, 0, 16, 2, kernel_tokens=kernel_block, pages=blocks, is_layerpush=not stock)
    topology = SimpleNamespace(tp_size=2, get_engine_info={"other": remote}.__getitem__)
    group = KVCacheGroupSpec(["state"], MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float16,)))
    cache = KVCacheConfig(8, [], [group] if mamba else [])
    worker = SimpleNamespace(
        transfer_topo=topology, block_size=16, _physical_blocks_per_logical_kv_block=2, kv_cache_config=cache
    )
    found = mismatch(worker, "other")
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


@pytest.mark.parametrize(
    ("theirs", "places", "moved"),
    [
        (16, {"0": (0, 64), "1": (64, 64)}, None),
        (32, {"0": (0, 128), "1": (128, 128)}, None),
        (16, {}, None),
        (16, {"1": (0, 64), "0": (64, 64)}, "0"),
        (16, {"0": (0, 64)}, "1"),
        (32, {"0": (0, 64), "1": (64, 64)}, "0"),
    ],
)
def test_rows_that_pack_layers_differently_are_seen(theirs: int, places: dict[str, Any], moved: str | None) -> None:
    """vLLM 0.33 refuses them, 0.32 does not."""
    from layerpush.compat.links import mismatch
    from layerpush.compat.pieces import StridedEngine
    from layerpush.core.layout import LayerCache, Region, match_layers

    layers = [LayerCache(name, 0, 64 * index, 1000, 64, 128) for index, name in enumerate("01")]
    remote = StridedEngine(1, 0, 16, 1, kernel_tokens=theirs, pages=1, is_layerpush=True, places=places)
    worker: Any = SimpleNamespace(
        transfer_topo=SimpleNamespace(tp_size=1, get_engine_info=lambda _: remote),
        block_size=16,
        _physical_blocks_per_logical_kv_block=1,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[], transfer_groups=[]),
    )
    found = mismatch(worker, "D", match_layers(layers, [Region(0, 128, 8)]))
    assert found == (moved and f"its rows have {moved} at another place than ours")


def test_rows_with_gaps_are_cut_where_their_size_is_equal() -> None:
    """Nothing says whether a gap grows with the tokens of a block."""
    from layerpush.compat.pieces import Strided, StridedEngine, _parts
    from layerpush.core.layout import LayerCache, Region, match_layers
    from layerpush.core.write import MismatchError

    def places(row_bytes: int, **known: Any) -> list[tuple[int, int]]:
        info = StridedEngine(1, 0, 16, 1, kernel_tokens=32, pages=1, places=known)
        info.regions[0] = [Strided(0, row_bytes, 0, row_bytes, 8)]
        return [(part.base, part.block_bytes) for part in _parts(layout, info, 0)]

    layers = [LayerCache(name, 0, 64 * index, 1000, 64, 160) for index, name in enumerate("01")]
    layout = match_layers(layers, [Region(0, 160, 8)])
    assert places(160) == [(0, 64), (64, 64)]
    assert places(320, a=(0, 128)) == [(0, 128), (128, 128)]
    with pytest.raises(MismatchError, match="and ours have gaps"):
        places(320)
    layout = match_layers(layers[:1], [Region(0, 160, 8)])
    with pytest.raises(MismatchError, match="cannot be cut as ours"):
        places(161, a=(0, 64))


def test_engines_of_two_block_sizes_have_lists_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our memory, too: their pieces differ."""
    from layerpush.compat import pieces
    from layerpush.compat.pieces import Strided, StridedEngine

    def cut_for(*_: Any) -> Any:
        info = _[2]
        return [[Strided(0, info.kernel_tokens, 0, 64, 8)]], [[Strided(0, info.kernel_tokens, 0, 64, 8)]], None

    monkeypatch.setattr(pieces, "size_difference", lambda *_: "its block size differs")
    monkeypatch.setattr(pieces, "_parts", lambda *_: [Strided(0, 64, 0, 64, 8)])
    monkeypatch.setattr(pieces, "_pieces", cut_for)
    worker: Any = SimpleNamespace(
        src_xfer_handles_by_tp_ratio={},
        nixl_wrapper=SimpleNamespace(prep_xfer_dlist=lambda _owner, rows, _memory: rows.tolist()),
        transfer_topo=SimpleNamespace(tp_ratio=lambda _: 1),
        region_mem_types=["DRAM"],
        dst_region_mem_types={"D": ["DRAM"]},
    )
    route: Any = Route("D0", 0, None, None)
    found = [
        pieces.cut(worker, "D", StridedEngine(1, 0, 16, 1, kernel_tokens=tokens), SimpleNamespace(), [route])
        for tokens in (32, 64, 32)
    ]
    assert [cut.routes[0].local_descriptors[0][1] for cut in found] == [32, 64, 32]


def prefill_rank(rank: int, ranks: int, heads: int, decode_ranks: int, *kinds: str, pages: int = 1) -> Any:
    """The facts that a rank of P has of itself and of a connected D, as vLLM's worker holds them."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MLAAttentionSpec,
        UniformTypeKVCacheSpecs,
    )

    specs: dict[str, Any] = {
        "heads": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16),
        "mla": MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16),
    }
    specs["mla and heads"] = UniformTypeKVCacheSpecs(16, {name: specs[name] for name in ("mla", "heads")})
    specs["no layers"] = specs["mla"]
    groups = [KVCacheGroupSpec([] if kind == "no layers" else [kind], specs[kind]) for kind in kinds]
    remote = SimpleNamespace(
        remote_tp_size=decode_ranks, remote_dcp_size=1, remote_physical_blocks_per_logical=pages, remote_block_size=16
    )
    topology = SimpleNamespace(
        tp_rank=rank,
        tp_size=ranks,
        dcp_size=1,
        total_num_kv_heads=heads,
        tp_ratio=lambda size: ranks // size if ranks >= size else -(size // ranks),
        get_engine_info={"D": remote}.__getitem__,
    )
    return SimpleNamespace(
        transfer_topo=topology,
        kv_cache_config=KVCacheConfig(8, [], groups),
        engine_id="P",
        dst_region_num_blocks={"P": [8], "D": [8]},
        _physical_blocks_per_logical_kv_block=pages,
    )


@pytest.mark.parametrize(
    ("ranks", "decode_ranks", "heads", "kinds", "counts"),
    [
        (8, 1, 1, ["mla"], [8]),
        (8, 2, 1, ["mla"], [4]),
        (4, 2, 1, ["mla"], [2]),
        (2, 2, 1, ["mla"], []),
        (2, 4, 1, ["mla"], []),
        (4, 1, 4, ["heads"], [1]),
        (4, 1, 8, ["heads"], [1]),
        (4, 1, 2, ["heads"], [2]),
        (8, 4, 2, ["heads"], [2]),
        (8, 1, 2, ["heads"], [4]),
        (4, 4, 2, ["heads"], []),
        (2, 4, 2, ["heads"], []),
        (4, 1, 4, ["heads", "mla"], [1, 4]),
        (4, 1, 2, ["mla", "heads"], [4, 2]),
        (4, 1, 4, ["mla and heads"], [1]),
        (4, 1, 2, ["mla and heads", "mla"], [2, 4]),
    ],
)
def test_ranks_with_equal_kv_for_a_decode_rank_share_its_blocks(
    ranks: int, decode_ranks: int, heads: int, kinds: list[str], counts: list[int]
) -> None:
    from layerpush.compat.links import replicas

    for rank in range(ranks):
        found = replicas(prefill_rank(rank, ranks, heads, decode_ranks, *kinds), "D")
        assert found == tuple(Replica(rank % count, count) for count in counts)


@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("registered", [1, 3, 11, 37])
def test_a_whole_push_sends_the_blocks_that_a_push_by_layer_sends(registered: int, pages: int) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

    from layerpush.compat.links import own_blocks

    ours, theirs = range(100 * pages, 140 * pages), range(1000, 1000 + registered * pages)
    sent = []
    for rank in range(4):
        worker = prefill_rank(rank, 4, 1, 1, "mla", pages=pages)
        own = own_blocks(worker, "D", ReadSpec(0, (list(ours),), (list(theirs),)))
        pairs = [*zip(own.local_block_ids[0], own.remote_block_ids[0], strict=True)]
        assert pairs, "vLLM attaches the completion to a WRITE"
        by_layer = [
            (ours[index - len(theirs)], theirs[index])
            for index in range(len(theirs))
            if Replica(rank, 4).owns(index // pages)
        ]
        assert pairs == by_layer or not by_layer
        sent += by_layer
    assert sorted(sent) == [*zip(ours[-len(theirs) :], theirs, strict=True)]


def test_a_whole_push_of_a_stage_without_layers_of_some_group_has_a_block() -> None:
    """In the stage's own group, rank 1 has no block. NIXL takes no WRITE without one."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

    from layerpush.compat.links import own_blocks

    worker, blocks = prefill_rank(1, 2, 1, 1, "mla", "no layers"), ([1, 2], list(range(10, 30)))
    assert own_blocks(worker, "D", ReadSpec(0, blocks, blocks)).local_block_ids == ([2], [29])


def test_a_rank_alone_sends_all_blocks_of_a_whole_push() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

    from layerpush.compat.links import own_blocks

    whole = ReadSpec(0, ([1, 2, 3],), ([7, 8],))
    assert own_blocks(prefill_rank(1, 4, 4, 1, "heads"), "D", whole) is whole
    assert own_blocks(prefill_rank(0, 2, 2, 2, "heads"), "D", whole) is whole


@pytest.mark.parametrize(
    ("theirs", "group_tokens", "reason"),
    [
        (48, 48, "its block size is 48 tokens, ours 32, and our layers have several block sizes"),
        (32 * 257, 32, "a block would have more than 256 pieces"),
        (16, 32, "its block size is 16 tokens, ours 32, and a block of other cannot be cut"),
    ],
)
def test_blocks_that_cannot_be_cut(theirs: int, group_tokens: int, reason: str) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from layerpush.compat.pieces import StridedEngine, cut
    from layerpush.core.layout import CacheLayout
    from layerpush.core.write import MismatchError

    spec = FullAttentionSpec(block_size=group_tokens, num_kv_heads=1, head_size=8, dtype=torch.float16)
    worker: Any = SimpleNamespace(
        block_size=32,
        _physical_blocks_per_logical_kv_block=1,
        kv_cache_config=KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], spec)]),
        attn_backends=[type("Other", (), {"__module__": "vllm.v1.attention.backends.other"})],
    )
    info = StridedEngine(1, 0, 32, 1, kernel_tokens=theirs, pages=1, is_layerpush=True)
    with pytest.raises(MismatchError, match=reason):
        cut(worker, "D", info, CacheLayout((), ()), ())


@pytest.mark.parametrize(("ours", "theirs"), [(16, 64), (64, 16)])
def test_a_block_of_either_side_in_the_layout_for_amx_cannot_be_cut(
    monkeypatch: pytest.MonkeyPatch, ours: int, theirs: int
) -> None:
    from vllm.v1.attention.backends import cpu_attn

    from layerpush.compat.pieces import _is_packed

    worker: Any = SimpleNamespace(
        block_size=ours,
        use_mla=False,
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: 64),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto")),
    )
    for supported in (True, False):
        monkeypatch.setattr(cpu_attn.torch.cpu, "_is_amx_tile_supported", lambda found=supported: found)
        assert _is_packed(worker, (ours, theirs)) == supported
