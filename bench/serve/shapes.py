"""The models that the bench makes by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from bench.demo.cluster import DEMO_SHAPE
from bench.servers.model import ModelShape
from bench.servers.workspace import model_cache

ShapeName = Literal["demo", "long"]
DEFAULT_SHAPE, LONG = get_args(ShapeName)
LONG_SHAPE = ModelShape(
    layers=8, hidden=256, heads=1, kv_heads=1, head_dim=128, intermediate=256, max_positions=1 << 16
)
"""Little computation for each byte of KV, with as many query heads as KV heads: 32k tokens on one core in seconds."""
SHAPES: Mapping[str, ModelShape] = {DEFAULT_SHAPE: DEMO_SHAPE, LONG: LONG_SHAPE}
USES = {DEFAULT_SHAPE: "that of make demo", LONG: "for prompts of 4k to 64k tokens"}


def described(name: str) -> str:
    """The model's use and shape, in words."""
    shape = SHAPES[name]
    heads = f"query heads {shape.heads} x {shape.head_dim}, KV heads {shape.kv_heads} x {shape.head_dim}"
    kv = f"{shape.kv_bytes_per_token >> 10} KiB of KV per token"
    return f"{USES[name]}, {shape.layers} layers, hidden size {shape.hidden}, {heads}, {kv}"


def folder(name: str) -> Path:
    """The default folder of a model."""
    return model_cache().with_name(f"{name}-model")
