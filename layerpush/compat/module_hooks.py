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

WRITTEN: dict[str, tuple[str, ...]] = {
    DEEPSEEK: (DEEPSEEK, DEEPSEEK_INDEX),
    MINIMAX: (MINIMAX, MINIMAX_INDEX),
    INKLING: (INKLING,),
    KIMI: (KIMI,),
    MLA: (DEEPSEEK_INDEX,),  # vLLM calls its own hook for this layer; the indexer runs before it
}
"""Classes of modules, and the classes of those layers in them that the step has written when ``forward`` returns.

Only classes whose source in vLLM 0.32 and 0.33 says so. They write on the stream of their caller. Not among them:
``InklingConvState``, which the rest of a decoder layer writes, too.
"""


def watch(
    vllm_config: VllmConfig, layer_saved: Callable[[str], None], written: Mapping[str, tuple[str, ...]] = WRITTEN
) -> list[str]:
    """Have ``layer_saved`` called with the name of each known layer, once it is written. Returns these names.

    Call it after torch has compiled the model. The layers of a drafter are left out: it may write to them in code of
    its own.
    """
    context = vllm_config.compilation_config.static_forward_context
    names = {layer: name for name, layer in context.items() if isinstance(layer, torch.nn.Module)}
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    watched: list[str] = []
    for module, name in names.items():
        kinds = written.get(_class_of(module), ())
        held = [names[part] for part in module.modules() if part in names and _class_of(part) in kinds]
        if held and not is_drafted(name, layers):
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
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return frozenset(name for name in names if is_drafted(name, layers))


def is_drafted(name: str, layers: int) -> bool:
    """Whether a layer may be a drafter's: those have numbers after the model's ``layers``, or a prefix."""
    found = re.search(r"\blayers\.(\d+)\.", name)
    return found is None or int(found[1]) >= layers or "draft" in name or "mtp" in name
