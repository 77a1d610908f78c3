"""KV caches with tensors of a GPU's shapes: which of them a worker pushes by layer, and which it packs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.connector.conftest import PORTS

BLOCKS, LAYERS, TOKENS = 24, 4, 64
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
INDEXERS = [f"model.layers.{layer}.self_attn.indexer.k_cache" for layer in range(LAYERS)]
LATENT, INDEX = 576, 132
"""Bytes of a token in a layer's cache and in its indexer's."""
Make = Callable[..., Any]


@pytest.fixture
def worker(world: None, model: Path) -> Iterator[Make]:
    """Builds the worker of a P with MLA, for these caches of these sizes of a token."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MLAAttentionSpec,
        UniformTypeKVCacheSpecs,
    )

    from tests.connector.engine import config_of

    made = []

    def build(layout: str, caches: dict[str, torch.Tensor], sizes: dict[str, int]) -> Any:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(PORTS.next_free())
        config = config_of(model, "kv_producer", "p")
        config.cache_config.num_gpu_blocks, config.cache_config.kv_cache_layout = BLOCKS, layout
        specs = {
            name: MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=size, dtype=torch.uint8)
            for name, size in sizes.items()
        }
        group = KVCacheGroupSpec(list(caches), UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs))
        if len(set(sizes.values())) == 1:
            group = KVCacheGroupSpec(list(caches), next(iter(specs.values())))
        tensors = [KVCacheTensor(size=1, layers=[name], offset=0, layer_stride=0, block_stride=0) for name in caches]
        cache = KVCacheConfig(BLOCKS, tensors, [group], kv_cache_layout=layout)
        made.append(KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache))
        found = made[-1].connector_worker
        found.use_mla, found._has_packed_cache = True, layout.startswith("BL")
        made[-1].register_kv_caches(caches)
        return found

    yield build
    for connector in made:
        connector.shutdown()


def test_mla_is_pushed_by_layer_if_each_layer_has_a_region(worker: Make) -> None:
    whole = torch.zeros(LAYERS, BLOCKS, TOKENS, LATENT, dtype=torch.uint8)
    found = worker("LBNHC", dict(zip(NAMES, whole, strict=True)), dict.fromkeys(NAMES, LATENT))
    assert found.pushes._identity.fallback is None
    assert found._gathering.strategy is not None


def test_mla_is_pushed_by_layer_if_layers_share_rows(worker: Make) -> None:
    """All MLA models with VLLM_KV_CACHE_LAYOUT=BLHNC, and DeepSeek-V4 always."""
    rows = torch.zeros(BLOCKS, LAYERS, TOKENS, LATENT, dtype=torch.uint8)
    caches = {name: rows[:, layer] for layer, name in enumerate(NAMES)}
    found = worker("BLNHC", caches, dict.fromkeys(NAMES, LATENT))
    assert found.pushes._identity.fallback is None
    assert found._gathering.strategy is not None
    page = TOKENS * LATENT
    assert found.layout.layer_bytes == (page,) * LAYERS
    assert found.layout.parts == tuple((0, layer * page, LAYERS * page) for layer in range(LAYERS))
    assert (found.num_regions, found.block_len_per_layer) == (1, [LAYERS * page]), "whole pushes send rows"


def test_a_cache_that_is_smaller_than_its_pages_is_pushed_whole(worker: Make) -> None:
    caches = {name: torch.zeros(BLOCKS, TOKENS, LATENT, dtype=torch.uint8) for name in NAMES}
    caches[NAMES[1]] = torch.zeros(BLOCKS, TOKENS, INDEX, dtype=torch.uint8)
    found = worker("LBNHC", caches, dict.fromkeys(NAMES, LATENT))
    page, held = TOKENS * LATENT, TOKENS * INDEX
    assert found.pushes._identity.fallback == (
        f"the KV cache cannot be told apart by layer: layer {NAMES[1]} has pages of {page} bytes but its regions [1] "
        f"hold {held} bytes a block"
    )


def test_an_indexer_beside_mla_is_pushed_by_layer_and_never_packed(
    worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek-V3.2: regions of two sizes."""
    sizes = dict.fromkeys(NAMES, LATENT) | dict.fromkeys(INDEXERS, INDEX)
    caches = {name: torch.zeros(BLOCKS, TOKENS, size, dtype=torch.uint8) for name, size in sizes.items()}
    with caplog.at_level("INFO", "vllm.layerpush"):
        found = worker("LBNHC", caches, sizes)
    assert found.pushes._identity.fallback is None
    assert found._gathering.strategy is None
    assert "gathers nothing: the regions of the KV cache differ in the size" in caplog.text
