"""Forward hooks of torch, for the layers whose KV reaches no operation of vLLM that calls the connector.

Such a hook runs after ``forward`` of a module, in Python. It does not run where a CUDA graph is replayed, nor in code
that torch has compiled. Then the sweep covers the layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEEPSEEK = "vllm.models.deepseek_v32.attention.DeepseekV32Attention"
MINIMAX = "vllm.models.minimax_m3.nvidia.model.MiniMaxM3SparseAttention"
INKLING = "vllm.models.inkling.nvidia.attention.InklingAttention"
KIMI = "vllm.models.kimi_k3.nvidia.mla.MultiHeadLatentAttention"
MLA = "vllm.model_executor.layers.attention.mla_attention.MLAAttention"
DEEPSEEK_INDEX = "vllm.model_executor.models.deepseek_v2.DeepseekV32IndexerCache"
MINIMAX_INDEX = "vllm.models.minimax_m3.common.indexer.MiniMaxM3IndexerCache"
INKLING_STATE = "vllm.models.inkling.nvidia.sconv_swa_attn.InklingConvState"
GLM_INDEX = "vllm.models.glm5next.common.attention.Glm5NextIndexerCache"
QWEN = "vllm.models.qwen4_exp.nvidia.qsa.Qwen4ExpQSAAttention"
QWEN_INDEX = "vllm.models.qwen4_exp.common.qsa_cache.QSACompressedKeyCache"
SPARSE_WINDOW = "vllm.v1.attention.backends.mla.sparse_swa.DeepseekV4SWACache"
V4, V41 = "vllm.models.deepseek_v4", "vllm.models.deepseek_v41"
V4_CACHES = (SPARSE_WINDOW, f"{V4}.attention.DeepseekV4IndexerCache", f"{V4}.compressor.CompressorStateCache")
V41_CACHES = (SPARSE_WINDOW, f"{V41}.attention.DeepseekV4IndexerCache")
V4_ATTENTIONS = (
    "flashmla.DeepseekV4FlashMLAAttention",
    "flashinfer_sparse.DeepseekV4FlashInferMLAAttention",
    "flashinfer_sparse.DeepseekV4FlashInferSM120Attention",
)
V41_MEGA = "flash_mla_mega_attn.DeepseekV4MegaAttnAttention"

WRITTEN: dict[str, tuple[str, ...]] = {
    DEEPSEEK: (DEEPSEEK, DEEPSEEK_INDEX),
    MINIMAX: (MINIMAX, MINIMAX_INDEX),
    INKLING: (INKLING,),
    KIMI: (KIMI,),
    MLA: (DEEPSEEK_INDEX, GLM_INDEX),  # vLLM calls its own hook for this layer; the indexer runs before it
    QWEN: (QWEN, QWEN_INDEX),
    **{f"{V4}.nvidia.{name}": (f"{V4}.nvidia.{name}", *V4_CACHES) for name in V4_ATTENTIONS},
    **{f"{V41}.nvidia.{name}": (f"{V41}.nvidia.{name}", *V41_CACHES) for name in (*V4_ATTENTIONS, V41_MEGA)},
}
"""Classes of modules, and the classes of those layers in them that the step has written when ``forward`` returns.

Only classes whose source in vLLM 0.32 and 0.33 says so. They write on the stream of their caller, or it waits for them.
"""

WRITTEN_BEFORE = {INKLING: INKLING_STATE}
"""The same for a layer in the module of that class before: code between the two writes it last."""


def watch(
    vllm_config: VllmConfig,
    layer_saved: Callable[[str], None],
    written: Mapping[str, tuple[str, ...]] = WRITTEN,
    written_before: Mapping[str, str] = WRITTEN_BEFORE,
) -> list[str]:
    """Have ``layer_saved`` called with the name of each known layer, once it is written. Returns these names.

    Call it after torch has compiled the model. The layers of a drafter are left out: it may write to them in code of
    its own. If several modules hold a layer, the first one writes it.
    """
    context = vllm_config.compilation_config.static_forward_context
    names = {layer: name for name, layer in context.items() if isinstance(layer, torch.nn.Module)}
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    watched: list[str] = []
    unfinished: list[str] = []
    for module, name in names.items():
        kind = _class_of(module)
        if kind not in written or _is_drafted(name, module, layers):
            continue
        parts = {names[part]: _class_of(part) for part in module.modules() if part in names}
        held = [part for part in parts if parts[part] in written[kind] and part not in watched] + unfinished
        unfinished = [part for part in parts if parts[part] == written_before.get(kind)]
        if held:
            module.register_forward_hook(partial(_forwarded, layer_saved, held))
            watched += held
    return watched


def _forwarded(layer_saved: Callable[[str], None], names: Sequence[str], *_: object) -> None:
    """The thread of a forward. A capture records no event for the writer, and a trace no call."""
    if torch.compiler.is_compiling() or _is_capturing():
        return
    for name in names:
        layer_saved(name)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())  # a CPU build raises there


def _class_of(module: torch.nn.Module) -> str:
    """Exact: a subclass may write elsewhere."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def drafted(vllm_config: VllmConfig, names: Iterable[str]) -> frozenset[str]:
    """Those of the layers ``names`` that a drafter may compute after the model's forward."""
    if vllm_config.speculative_config is None:
        return frozenset()
    modules = vllm_config.compilation_config.static_forward_context
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return frozenset(name for name in names if _is_drafted(name, modules.get(name), layers))


def _is_drafted(name: str, layer: object, layers: int) -> bool:
    """Whether a layer may be a drafter's. vLLM marks them, but for the V1 runner of vLLM 0.32. There the name decides:
    they have numbers after the model's ``layers``, or a prefix.
    """
    found = re.search(r"\blayers\.(\d+)\.", name)
    by_name = found is None or int(found[1]) >= layers or "draft" in name or "mtp" in name
    return by_name or bool(getattr(layer, "is_draft_layer", False))
