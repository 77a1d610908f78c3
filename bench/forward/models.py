"""KV caches of known models, as one rank holds them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BLOCK_TOKENS = 16
"""Tokens of a block."""


@dataclass(frozen=True)
class ModelGeometry:
    """``token_bytes`` are the bytes of a token in one layer of one rank's cache."""

    about: str
    layers: int
    token_bytes: int

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.token_bytes


def grouped_query(about: str, layers: int, heads: int, head_dim: int, element_bytes: int = 2) -> ModelGeometry:
    """Keys and values of ``heads`` KV heads."""
    return ModelGeometry(about, layers, 2 * heads * head_dim * element_bytes)


def latent(about: str, layers: int, latent_dim: int, rope_dim: int, element_bytes: int = 2) -> ModelGeometry:
    """Multi-head latent attention: one vector for all heads, on each rank."""
    return ModelGeometry(about, layers, (latent_dim + rope_dim) * element_bytes)


MODELS: Mapping[str, ModelGeometry] = {
    "llama-8b": grouped_query("Llama-3.1-8B, TP 1", layers=32, heads=8, head_dim=128),
    "llama-70b-tp8": grouped_query("Llama-3.1-70B, a rank of TP 8", layers=80, heads=1, head_dim=128),
    "qwen3-30b-a3b": grouped_query("Qwen3-30B-A3B, TP 1", layers=48, heads=4, head_dim=128),
    "deepseek-mla": latent("DeepSeek-V3, MLA", layers=61, latent_dim=512, rope_dim=64),
    "llama-8b-tp8": grouped_query("Llama-3.1-8B, a rank of TP 8", layers=32, heads=1, head_dim=128),
    "qwen3-30b-a3b-tp4": grouped_query("Qwen3-30B-A3B, a rank of TP 4", layers=48, heads=1, head_dim=128),
    "deepseek-mla-fp8": latent(
        "DeepSeek-V3, MLA, 8 bits a number", layers=61, latent_dim=512, rope_dim=64, element_bytes=1
    ),
}
WHOLE = ("llama-8b", "llama-70b-tp8", "qwen3-30b-a3b", "deepseek-mla")
"""Each model on as few ranks as usual."""
SMALL = ("llama-8b-tp8", "llama-70b-tp8", "qwen3-30b-a3b-tp4", "deepseek-mla-fp8")
"""The same models with caches of about one KV head a token: 128k tokens take 2 to 5 GiB. More ranks do not shrink MLA,
because each rank holds all of it, but 8 bits a number do.
"""
