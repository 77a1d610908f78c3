"""The options of all engines, and their model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from bench.demo.cluster import DEMO_SHAPE
from bench.provenance import unplaced
from bench.serve.tokenizer import write_tokenizer
from bench.servers.model import ModelShape, write_model
from bench.servers.workspace import model_cache

ShapeName = Literal["demo", "long"]
DEFAULT_SHAPE, LONG = get_args(ShapeName)
LONG_SHAPE = ModelShape(
    layers=8, hidden=256, heads=1, kv_heads=1, head_dim=128, intermediate=256, max_positions=1 << 16
)
"""Little computation for each byte of KV, with as many query heads as KV heads: 32k tokens on one core in seconds."""
SHAPES: Mapping[str, ModelShape] = {DEFAULT_SHAPE: DEMO_SHAPE, LONG: LONG_SHAPE}
ROOM_TOKENS = 64
"""Tokens of a request beside its prompt and its answer, at most."""


@dataclass(frozen=True)
class ServedModel:
    """The model of the engines. ``kv_bytes_per_token`` is None for a model of the user."""

    path: Path
    tokenizer: Path
    longest: int
    kv_bytes_per_token: int | None

    @classmethod
    def of_directory(cls, path: Path) -> ServedModel:
        """A model on disk with a tokenizer of its own. Raises ``ValueError``."""
        try:
            config = json.loads((path / "config.json").read_text())
            longest = config.get("text_config", config)["max_position_embeddings"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path} is no directory of a model: config.json: {error!r}") from error
        return cls(path, path, longest, None)


@dataclass(frozen=True)
class EngineOptions:
    """The options of all engines. ``model`` is a directory; None stands for a model that the bench makes."""

    model: str | None = None
    shape: ShapeName | None = None
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    corrupt: bool = False

    @property
    def shape_name(self) -> ShapeName:
        return self.shape or DEFAULT_SHAPE

    def longest_prompt(self, answer_tokens: int) -> int:
        """In tokens. Raises ``ValueError`` for a directory without a model."""
        longest = (
            ServedModel.of_directory(Path(self.model)).longest if self.model else SHAPES[self.shape_name].max_positions
        )
        return longest - answer_tokens - ROOM_TOKENS

    def built(self, work: Path) -> ServedModel:
        """The model on disk. Makes it if the user has none, with a tokenizer in ``work``."""
        if self.model is not None:
            return ServedModel.of_directory(Path(self.model).resolve())
        shape = SHAPES[self.shape_name]
        path = write_model(folder(self.shape_name), shape)
        tokenizer = write_tokenizer(work / "tokenizer", shape.vocabulary, shape.max_positions, shape.config())
        return ServedModel(path, tokenizer, shape.max_positions, shape.kv_bytes_per_token)

    def can_fork(self) -> bool:
        """A device other than the CPU cannot be used after a fork, and vLLM reads some variables before it."""
        from vllm.platforms import current_platform

        return current_platform.is_cpu() and not (self.options or self.variables)

    def about_model(self) -> str | dict[str, Any]:
        """The user's directory, or the shape."""
        if self.model is not None:
            return unplaced(self.model)
        shape = SHAPES[self.shape_name]
        return {**asdict(shape), "kv_bytes_per_token": shape.kv_bytes_per_token}


def folder(name: str) -> Path:
    """The default folder of a model."""
    return model_cache().with_name(f"{name}-model")
