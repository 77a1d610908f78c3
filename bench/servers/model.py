"""A random-weight Llama on disk, the same bits for the same arguments."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

FORMAT = 1
STAMP = "layerpush-model.json"


@dataclass(frozen=True)
class ModelShape:
    """Shape and seed of a model. They determine its weights."""

    layers: int = 16
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 1024
    vocabulary: int = 2048
    max_positions: int = 16384
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden ({self.hidden}) must be a multiple of heads ({self.heads}); Transformers asks for it"
            )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token leaves in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * {"float32": 4, "bfloat16": 2}[self.dtype]

    def config(self) -> dict[str, object]:
        """The ``config.json`` that Transformers and vLLM read."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "vocab_size": self.vocabulary,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Name, shape and standard deviation of each weight; a deviation of 0 stands for all ones (norms).

        Q and K are scaled up so that attention is peaked: with flat attention every head would return the mean of
        all values, and the tokens would hardly depend on any single layer's KV.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        fan_hidden, sharp = self.hidden**-0.5, 2.0
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden), 1.0
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (self.hidden,), 0.0
            yield f"{at}.self_attn.q_proj.weight", (q, self.hidden), sharp * fan_hidden
            yield f"{at}.self_attn.k_proj.weight", (kv, self.hidden), sharp * fan_hidden
            yield f"{at}.self_attn.v_proj.weight", (kv, self.hidden), fan_hidden
            yield f"{at}.self_attn.o_proj.weight", (self.hidden, q), q**-0.5
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,), 0.0
            yield f"{at}.mlp.gate_proj.weight", (self.intermediate, self.hidden), fan_hidden
            yield f"{at}.mlp.up_proj.weight", (self.intermediate, self.hidden), fan_hidden
            yield f"{at}.mlp.down_proj.weight", (self.hidden, self.intermediate), self.intermediate**-0.5
        yield "model.norm.weight", (self.hidden,), 0.0
        yield "lm_head.weight", (self.vocabulary, self.hidden), fan_hidden


def write_model(directory: Path | str, shape: ModelShape, device: str = "cpu") -> Path:
    """Write the model to ``directory`` and return that path; an identical model already there is left alone.

    There is no tokenizer: start servers with ``--skip-tokenizer-init`` and send token ids. ``device`` makes the
    weights, and another kind of device makes others. Raises ``FileExistsError`` if ``directory`` has files, but no
    model of ours.
    """
    target = Path(directory).resolve()
    stamp = json.dumps({"format": FORMAT, "device": device, **asdict(shape)}, sort_keys=True)
    if _text(target / STAMP) == stamp:
        return target
    if target.exists() and any(target.iterdir()) and not (target / STAMP).is_file():
        raise FileExistsError(f"{target} holds files, but no {STAMP} of ours; choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        _write_weights(fresh / "model.safetensors", shape, device)
        (fresh / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
        (fresh / STAMP).write_text(stamp)
        fresh.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        try:
            os.replace(fresh, target)
        except OSError:
            if _text(target / STAMP) != stamp:  # another process may have built the same model meanwhile
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _write_weights(path: Path, shape: ModelShape, device: str) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(shape.seed)
    how: Any = {"device": device, "dtype": getattr(torch, shape.dtype)}

    def weight(size: tuple[int, ...], deviation: float) -> torch.Tensor:
        made = torch.randn(size, generator=generator, **how).mul_(deviation) if deviation else torch.ones(size, **how)
        return made.cpu()

    weights = {name: weight(size, deviation) for name, size, deviation in shape.tensors()}
    save_file(weights, path, metadata={"format": "pt"})
