"""Modules that write KV without vLLM's operations: their hooks report the written layers, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from layerpush.compat.module_hooks import MLA, WRITTEN, WRITTEN_BEFORE, drafted, watch
from scripts.docgen.hooks import VllmSource
from tests.quotes import package

LAYERS = 2


class Cache(nn.Module):
    """Owns a cache. Another module writes to it."""


class OtherCache(nn.Module):
    """As ``Cache``, but the code around the attention writes to it, too."""


class Attention(nn.Module):
    """Writes its own cache and its indexer's when it is called."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__()
        self.log, self.name = log, name
        self.indexer = nn.Module()
        self.indexer.cache, self.indexer.other = Cache(), OtherCache()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            raise ValueError("no token")
        self.log.append(f"wrote {self.name}")
        return x


class Subclass(Attention):
    """It may write elsewhere."""


def kind(layer: type) -> str:
    return f"{__name__}.{layer.__qualname__}"


OWN = {kind(Attention): (kind(Attention), kind(Cache))}
X = torch.ones(1)


def context(**layers: Any) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: LAYERS),
    )


def config_of(module: Attention, name: str) -> Any:
    indexer = module.indexer
    caches = {f"{name}.indexer.cache": indexer.cache, f"{name}.indexer.other": indexer.other}
    return context(**{name: module, **caches})


@pytest.fixture
def log() -> list[str]:
    return []


def test_a_layer_is_saved_after_the_forward_of_its_module(log: list[str]) -> None:
    module = Attention(log, "model.layers.1.attn")
    names = watch(config_of(module, module.name), log.append, OWN)
    assert names == [module.name, f"{module.name}.indexer.cache"]
    for _ in range(2):
        log.clear()
        module(X)
        assert log == [f"wrote {module.name}", *names]


def test_a_class_may_write_only_the_cache_of_another_layer(log: list[str]) -> None:
    """vLLM's own hook reports the attention; its indexer ran before."""
    module = Attention(log, "model.layers.0.attn")
    watch(config_of(module, module.name), log.append, {kind(Attention): (kind(Cache),)})
    module(X)
    assert log == [f"wrote {module.name}", f"{module.name}.indexer.cache"]


def test_a_cache_that_two_modules_hold_belongs_to_the_first(log: list[str]) -> None:
    """DeepSeek-V4.1: a later layer's indexer reads the keys of an earlier one."""
    first, second = (Attention(log, f"model.layers.{layer}.attn") for layer in range(LAYERS))
    second.indexer.cache = first.indexer.cache
    config = context(**{first.name: first, f"{first.name}.indexer.cache": first.indexer.cache, second.name: second})
    assert watch(config, log.append, OWN) == [first.name, f"{first.name}.indexer.cache", second.name]


def test_a_cache_is_saved_by_the_next_module_if_code_between_them_writes_it(log: list[str]) -> None:
    """Inkling: the convolution behind a layer's MLP runs at the beginning of the next layer."""
    modules = [Attention(log, f"model.layers.{layer}.attn") for layer in range(LAYERS)]
    draft = Attention(log, "mtp.layers.0.attn")
    layers = [config_of(module, module.name).compilation_config.static_forward_context for module in (*modules, draft)]
    watch(context(**layers[0], **layers[1], **layers[2]), log.append, OWN, {kind(Attention): kind(OtherCache)})
    for module in (*modules, draft):
        module(X)
    first, second = (module.name for module in modules)
    assert [line for line in log if not line.startswith("wrote")] == [
        first, f"{first}.indexer.cache", second, f"{second}.indexer.cache", f"{first}.indexer.other"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Subclass, "model.layers.0.attn"),
        (Attention, f"model.layers.{LAYERS}.attn"),
        (Attention, "draft_model.layers.0.attn"),
        (Attention, "mtp.layers.0.attn"),
        (Attention, "attn"),
    ],
)
def test_unknown_and_drafter_layers_get_no_hook(module: type[Attention], name: str, log: list[str]) -> None:
    layer = module(log, name)
    assert watch(config_of(layer, name), log.append, OWN) == []
    layer(X)
    assert log == [f"wrote {name}"]


def test_a_layer_without_a_module_gets_no_hook(log: list[str]) -> None:
    assert watch(context(**{"model.layers.0.attn": SimpleNamespace()}), log.append, OWN) == []


def test_a_failed_forward_saves_no_layer(log: list[str]) -> None:
    module = Attention(log, "model.layers.0.attn")
    watch(config_of(module, module.name), log.append, OWN)
    with pytest.raises(ValueError, match="no token"):
        module(torch.ones(0))
    assert log == []


@pytest.mark.parametrize(
    "moment", [["torch.compiler.is_compiling"], ["torch.cuda.is_initialized", "torch.cuda.is_current_stream_capturing"]]
)
def test_neither_a_trace_nor_a_capture_saves_a_layer(
    moment: list[str], log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Attention(log, "model.layers.0.attn")
    watch(config_of(module, module.name), log.append, OWN)
    for asked in moment:
        monkeypatch.setattr(asked, lambda: True)
    module(X)
    assert log == [f"wrote {module.name}"]


def test_vllm_has_each_class_and_calls_no_hook_for_its_layer() -> None:
    unhooked = {layer.name: layer for layer in VllmSource(package("vllm")).unhooked()}
    written = {name for names in WRITTEN.values() for name in names}
    assert written | {*WRITTEN_BEFORE.values()} <= set(unhooked)
    assert set(WRITTEN) - set(unhooked) == {MLA}
    assert set(WRITTEN_BEFORE) <= set(WRITTEN)
    for name in set(WRITTEN) - {MLA}:
        bodies = [layer.node.body for layer in unhooked[name].lineage]
        assert "forward" in {getattr(node, "name", "") for body in bodies for node in body}


@pytest.mark.parametrize("speculative", [None, object()])
def test_the_layers_of_a_drafter(speculative: object | None) -> None:
    """A name that shows no number may be a drafter's, and vLLM marks layers with any name."""
    marked = "language_model.layers.1.self_attn.attn"
    config = context(**{marked: SimpleNamespace(is_draft_layer=True)})
    config.speculative_config = speculative
    models = {f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)}
    others = {
        f"model.layers.{LAYERS}.self_attn.attn",
        "draft.layers.0.attn",
        "mtp.layers.0.attn",
        "transformer.h.0.attn",
        marked,
    }
    assert drafted(config, models | others) == (others if speculative else set())
