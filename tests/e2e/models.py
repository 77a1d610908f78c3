"""The engines' models: one small Llama, and the same weights with other attention."""

import json
import pathlib
from dataclasses import replace
from typing import Any

from bench.serve.tokenizer import write_tokenizer
from bench.servers.model import ModelShape, write_model
from tests.e2e import zoo
from tests.e2e.enginespec import ModelName

SHAPE = ModelShape(layers=8, hidden=128, heads=2, kv_heads=2, head_dim=32, intermediate=256, vocabulary=1024)
LAYERS = SHAPE.layers
VOCABULARY = range(3, SHAPE.vocabulary)
"""The token ids of prompts: all but the special ones."""
WINDOW = 200
EVERY_OTHER = ["full_attention", "sliding_attention"] * (LAYERS // 2)

ATTENTION_CHUNK = 128
ADAPTERS = ("adapter", "other-adapter")
"""The folders of a model's LoRA adapters."""
LORA_RANK = 8
DRAFTER = "drafter"
"""The folder of a model's drafter."""

# Changes in config.json. MistralForCausalLM has Llama's weight names; the MLA model gets vLLM's dummy weights.
CHANGES: dict[ModelName, dict[str, Any]] = {
    "sliding": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
    "hybrid": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": WINDOW,
        "layer_types": EVERY_OTHER,
    },
    "chunked": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "attention_chunk_size": ATTENTION_CHUNK,
        "interleave_moe_layer_step": 0,
        "intermediate_size_mlp": 256,
        "moe_layers": [],
        "no_rope_layers": [1, 0] * (LAYERS // 2),
    },
    "eagle": {},
    "lora": {},
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": LAYERS,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "topk_group": 1,
        "v_head_dim": 32,
    },
    "mtp": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "moe_layer_start_index": LAYERS,
        "num_nextn_predict_layers": 1,
    },
}


class ModelShelf:
    """Builds each model once per session, at its first use."""

    def __init__(self, scratch: pathlib.Path) -> None:
        self._folder = scratch / "models"

    def path(self, name: ModelName) -> pathlib.Path:
        """The directory that vLLM loads."""
        llama = write_model(self._folder / "llama", SHAPE)
        if name == "llama":
            return llama
        if name == "one kv head":
            return write_model(self._folder / "one-kv-head", replace(SHAPE, kv_heads=1))
        path = self._folder / name
        if not path.exists():
            path.mkdir()
            if name == "images":
                zoo.build(zoo.IMAGES, path)
                _build_image_processor(path)
                return path
            if name in zoo.FAMILIES:
                zoo.build(zoo.FAMILIES[name], path)
                if name == "Gemma4ForCausalLM":
                    zoo.build(zoo.ASSISTANT, path / DRAFTER)
                return path
            config = json.loads((llama / "config.json").read_text()) | CHANGES[name]
            (path / "config.json").write_text(json.dumps(config))
            if name == "chunked":
                _rename_weights(llama / "model.safetensors", path / "model.safetensors", ".mlp.", ".feed_forward.")
            else:
                (path / "model.safetensors").symlink_to(llama / "model.safetensors")
            if name == "lora":
                for seed, adapter in enumerate(ADAPTERS):
                    _build_adapter(path / adapter, config, seed)
            if name == "eagle":
                _build_drafter(path / DRAFTER, llama / "model.safetensors", config)
            if name == "mtp":
                _build_mtp(path / "mtp.safetensors", llama / "model.safetensors")
        return path


def _rename_weights(source: pathlib.Path, target: pathlib.Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = {name.replace(old, new): weight for name, weight in load_file(source).items()}
    save_file(weights, target, metadata={"format": "pt"})


def _build_drafter(path: pathlib.Path, target: pathlib.Path, config: dict[str, Any]) -> None:
    """EAGLE: the model's first layer behind a matrix. It takes the model's embeddings and its head."""
    from safetensors.torch import save_file

    layer = _first_layer(target, "layers.0", "fc")
    del layer["layers.0.input_layernorm.weight"]
    path.mkdir()
    save_file(layer, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


def _build_mtp(path: pathlib.Path, target: pathlib.Path) -> None:
    """Multi-token prediction as in ERNIE: the model's first layer behind two norms and a matrix."""
    import torch
    from safetensors.torch import save_file

    layer = _first_layer(target, "model.mtp_block.0", "model.mtp_linear_proj.0")
    norms = {f"model.mtp_{name}_norm.0.weight": torch.ones(SHAPE.hidden) for name in ("emb", "hidden")}
    save_file(layer | norms, path, metadata={"format": "pt"})


def _first_layer(target: pathlib.Path, layer: str, matrix: str) -> dict[str, Any]:
    """The weights of the model's first layer, and of a matrix from two hidden states to one, under these names."""
    import torch
    from safetensors.torch import load_file

    old, hidden = "model.layers.0.", SHAPE.hidden
    found = {name.replace(old, f"{layer}."): weight for name, weight in load_file(target).items() if old in name}
    joined = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(0)) * hidden**-0.5
    return found | {f"{matrix}.weight": joined}


def _build_image_processor(path: pathlib.Path) -> None:
    """BLIP-2's, without torchvision, and a tokenizer: vLLM asks it for the token in the place of an image."""
    from transformers import Blip2Processor, PreTrainedTokenizerFast
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    config = json.loads((path / "config.json").read_text())
    write_tokenizer(path, config["image_token_index"], SHAPE.max_positions, config)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    size = dict.fromkeys(("height", "width"), config["vision_config"]["image_size"])
    Blip2Processor(BlipImageProcessorPil(size=size), tokenizer, config["num_query_tokens"]).save_pretrained(path)


def _build_adapter(path: pathlib.Path, config: dict[str, Any], seed: int) -> None:
    """LoRA weights for the projections of K and V, large enough to change the tokens."""
    import torch
    from safetensors.torch import save_file

    hidden, kv = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for projection in ("k_proj", "v_proj"):
            at = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{at}.lora_A.weight"] = torch.randn(LORA_RANK, hidden, generator=generator) * hidden**-0.5
            weights[f"{at}.lora_B.weight"] = torch.randn(kv, LORA_RANK, generator=generator) * LORA_RANK**-0.5
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "target_modules": ["k_proj", "v_proj"],
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter))
