"""The KV cache and the computation of a model, from its ``config.json``. Pure.

The bytes of a token follow vLLM (``v1/kv_cache_interface.py``, ``transformers_utils/model_arch_config_convertor.py``):
keys and values of a rank's KV heads, of which each rank has one at least; with MLA one latent vector, the same on each
rank. The computation: two operations for each parameter that a token uses and, in each layer, for each number of
queries and outputs and each token attended to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from layerpush.core.kv_kind import KvKind, in_chunk, in_window

Config = Mapping[str, Any]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
SPANS: Mapping[str, tuple[str, Callable[[int], Callable[[int], int]]]] = {
    SLIDING: ("sliding_window", in_window),
    CHUNKED: ("attention_chunk_size", in_chunk),
}
"""For each kind of layer that attends to some tokens only, the key with their number."""
FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Without ``layer_types``: every so many layers one attends to all tokens; the others have a window."""
ALL_SLIDE = ("mistral", "phi3")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe")
"""Types of models with ``kv_lora_rank`` for which vLLM keeps latent vectors; for others it keeps keys and values."""
STATES = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "ssm_cfg",
    "linear_attn_config",
    "linear_num_value_heads",
    "attn_type_list",
    "hybrid_override_pattern",
    "layers_block_type",
    "attn_layer_period",
    "conv_L_cache",
)
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(STATES, "layers with a state (Mamba, GDN, linear attention), to whose size vLLM pads blocks"),
    "is_encoder_decoder": "an encoder, whose KV another attention reads",
    "index_topk": "sparse attention with an indexer, which has a cache of its own",
    "compress_ratios": "compressed attention, whose layers have caches of several kinds",
    "num_kv_shared_layers": "layers that share the KV of others",
    "block_configs": "layers that differ in their KV heads",
    "global_head_dim": "layers that differ in their head size",
}
"""Keys of models whose bytes are not estimated, and what such a model has."""
KV_DTYPES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of a number in the KV cache, by ``--kv-cache-dtype``."""


class ModelError(ValueError):
    """The model cannot be estimated. The text names the key, and what to do."""


@dataclass(frozen=True)
class Model:
    """``config`` is that of the language model. ``element_bytes``: see ``KV_DTYPES``."""

    name: str
    config: Config
    element_bytes: int

    def __post_init__(self) -> None:
        """Raises ``ModelError``."""
        for key, what in REFUSED.items():
            if self.config.get(key):
                raise ModelError(
                    f"{self.name} has `{key}`: {what}; only a measurement can tell, see docs/benchmarks.md"
                )

    def whole(self, key: str, *, fix: str = "") -> int:
        """The positive integer of a key. Raises ``ModelError`` with the ``fix``."""
        value = self.config.get(key)
        if not isinstance(value, int) or value < 1:
            found = f"`{key}` {value!r}, no number of at least 1" if key in self.config else f"no `{key}`"
            raise ModelError(f"{self.name} has {found}: {fix or 'add it, as the configs of newer models have it'}")
        return value

    @property
    def layers(self) -> int:
        return self.whole("num_hidden_layers")

    @property
    def heads(self) -> int:
        return self.whole("num_attention_heads")

    @property
    def is_latent(self) -> bool:
        """Whether it has multi-head latent attention (MLA)."""
        model_type, rank = self.config.get("model_type"), self.config.get("kv_lora_rank")
        if rank and model_type not in LATENT:
            raise ModelError(
                f"{self.name} has `kv_lora_rank`, and its `model_type` {model_type} is none of {', '.join(LATENT)}: "
                "remove the key if vLLM keeps keys and values of this model"
            )
        return bool(rank)

    @property
    def kv_heads(self) -> int:
        """1 with MLA."""
        if self.is_latent:
            return 1
        fix = "add it; it is `num_attention_heads` if every head has keys of its own, and 1 with multi-query attention"
        return self.whole("num_key_value_heads", fix=fix)

    @property
    def head_dim(self) -> int:
        return self.whole("head_dim") if self.config.get("head_dim") else self.whole("hidden_size") // self.heads

    @property
    def head_bytes(self) -> int:
        """Bytes of a token's keys and values in one KV head of one layer; with MLA, of its latent vector."""
        if self.is_latent:
            return (self.whole("kv_lora_rank") + self.whole("qk_rope_head_dim")) * self.element_bytes
        return 2 * self.head_dim * self.element_bytes

    def rank_bytes(self, ranks: int) -> int:
        """Bytes of a token in one layer on each of so many tensor parallel ranks. Raises ``ModelError``."""
        if self.heads % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            raise ModelError(
                f"{self.name} has {self.heads} heads and {self.kv_heads} KV heads, which vLLM cannot split among "
                f"{ranks} ranks: choose a tensor parallel size that divides both"
            )
        return max(1, self.kv_heads // ranks) * self.head_bytes

    @cached_property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        """Of each layer: its kind, a key of ``SPANS`` or ``FULL``, and the tokens of its window or chunk."""
        names, window = self.config.get("layer_types"), self.config.get("sliding_window")
        model_type = self.config.get("model_type")
        if names is None and window and self.config.get("use_sliding_window", True):
            every = self.config.get("sliding_window_pattern") or FULL_EVERY.get(str(model_type))
            if every is None and model_type not in ALL_SLIDE:
                raise ModelError(
                    f"{self.name} has `sliding_window` and no `layer_types`: add it, with {FULL} or {SLIDING}"
                )
            names = [FULL if every and (layer + 1) % every == 0 else SLIDING for layer in range(self.layers)]
        elif names is None and self.config.get("attention_chunk_size"):
            raise ModelError(
                f"{self.name} has `attention_chunk_size` and no `layer_types`: add it, with {FULL} or {CHUNKED}"
            )
        names = names or [FULL] * self.layers
        if unknown := set(names) - {FULL, *SPANS}:
            raise ModelError(f"{self.name} has layers of {unknown.pop()} in `layer_types`: {REFUSED[STATES[0]]}")
        if len(names) != self.layers:
            raise ModelError(f"{self.name} has {len(names)} `layer_types` for {self.layers} layers")
        return tuple((name, self.whole(SPANS[name][0]) if name in SPANS else 0) for name in names)

    def kind(self, kind: tuple[str, int], block_tokens: int) -> KvKind:
        """The KV cache of layers of a kind."""
        name, tokens = kind
        return KvKind(block_tokens, first_attended=SPANS[name][1](tokens)) if tokens else KvKind(block_tokens)

    # Computation.

    @property
    def parameters(self) -> int:
        """The parameters that a token uses, without embeddings. Raises ``ModelError``."""
        get, hidden = self._size, self._size("hidden_size")
        if self.is_latent:
            queries, latent = self.heads * self._query_dim, get("kv_lora_rank")
            rank = self.config.get("q_lora_rank")
            attention = rank * (hidden + queries) if rank else hidden * queries
            attention += hidden * (latent + get("qk_rope_head_dim"))
            attention += latent * self.heads * (get("qk_nope_head_dim") + get("v_head_dim"))
            attention += self.heads * get("v_head_dim") * hidden
        else:
            attention = hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        experts = int(self.config.get("num_experts_per_tok") or 0)
        if not experts:
            return self.layers * (attention + 3 * hidden * get("intermediate_size"))
        dense, shared = (int(self.config.get(key) or 0) for key in ("first_k_dense_replace", "n_shared_experts"))
        width = get("moe_intermediate_size" if "moe_intermediate_size" in self.config else "intermediate_size")
        sparse = 3 * hidden * width * (experts + shared)
        wide = 3 * hidden * get("intermediate_size") if dense else 0
        return self.layers * attention + dense * wide + (self.layers - dense) * sparse

    def operations(self, start: int, end: int) -> float:
        """Floating-point operations for tokens ``[start, end)`` of a prompt. Raises ``ModelError``."""
        pair = 2 * self.heads * (self._query_dim + (self._size("v_head_dim") if self.is_latent else self.head_dim))
        mean = (start + end) / 2
        attended = sum(min(mean, tokens) if tokens else mean for _, tokens in self.kinds)
        return (end - start) * (2 * self.parameters + pair * attended)

    @property
    def _query_dim(self) -> int:
        return self._size("qk_nope_head_dim") + self._size("qk_rope_head_dim") if self.is_latent else self.head_dim

    def _size(self, key: str) -> int:
        return self.whole(key, fix="add it, or give P's speed with --tokens-per-s instead of --gpu")


def model_of(name: str, kv_cache_dtype: str = "auto") -> Model:
    """The model of a name of ``MODELS``, or of the path of a ``config.json``. Raises ``ModelError``."""
    if name in MODELS:
        config: Any = MODELS[name]
    elif not (path := Path(name)).is_file():
        path_of = f"{name} is a folder: name its config.json" if path.is_dir() else f"there is no file {name}"
        raise ModelError(f"{path_of}; known names: {', '.join(MODELS)}")
    else:
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise ModelError(f"{name} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{name} is no JSON object")
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if scheme and kv_cache_dtype == "auto":
        raise ModelError(f"{name} has a `kv_cache_scheme`: say --kv-cache-dtype fp8, or bfloat16 if you override it")
    text = config.get("text_config") or config
    return Model(name, {**text, "is_encoder_decoder": config.get("is_encoder_decoder")}, KV_DTYPES[kv_cache_dtype])


def _config(
    layers: int, hidden: int, heads: int, kv_heads: int, wide: int, head_dim: int = 128, **others: Any
) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": wide,
        **others,
    }


MODELS: Mapping[str, Config] = {
    "llama-3.2-3b": _config(28, 3072, 24, 8, 8192),
    "llama-3.1-8b": _config(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _config(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _config(126, 16384, 128, 8, 53248),
    "qwen3-32b": _config(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _config(48, 2048, 32, 4, 6144, moe_intermediate_size=768, num_experts_per_tok=8),
    "qwen3-235b-a22b": _config(94, 4096, 64, 4, 12288, moe_intermediate_size=1536, num_experts_per_tok=8),
    "gpt-oss-120b": _config(
        36, 2880, 64, 8, 2880, 64, num_experts_per_tok=4, sliding_window=128, layer_types=[SLIDING, FULL] * 18
    ),
    "gemma-3-27b": _config(62, 5376, 32, 16, 21504, sliding_window=1024, sliding_window_pattern=6),
    "deepseek-v3": _config(
        61,
        7168,
        128,
        128,
        18432,
        model_type="deepseek_v3",
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=2048,
        num_experts_per_tok=8,
        n_shared_experts=1,
        first_k_dense_replace=3,
    ),
}
"""The keys that are read of the ``config.json`` of each model."""
