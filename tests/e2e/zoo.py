"""Small random models of many architectures, and how layerpush pushes their KV."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture of vLLM's registry, and a small configuration of it.

    `fields` go to the configuration class of Transformers' `model_type`, over `COMMON`.
    `states` counts the layers with a state: no hook reports them.
    `tokens`: whether D's tokens equal P's own. They differ where vLLM's CPU kernels round differently in decode.
    """

    architecture: str
    model_type: str
    attention: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: tuple[tuple[str, Any], ...] = ()
    states: int = 0
    tokens: bool = True


FULL = "full attention"
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
WINDOWS = ["sliding_attention", "full_attention"] * 2
MLA = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GEMMA = {
    "sliding_window": 200,
    "layer_types": WINDOWS,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "num_kv_shared_layers": 2,
}
TOWER = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
BFLOAT16 = (("dtype", "bfloat16"),)

FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", FULL),
        Family("MistralForCausalLM", "mistral", "sliding window", {"sliding_window": 200}),
        Family("MixtralForCausalLM", "mixtral", f"{FULL}, experts", {"num_local_experts": 4}),
        Family("Qwen2ForCausalLM", "qwen2", FULL),
        Family("Qwen2MoeForCausalLM", "qwen2_moe", f"{FULL}, experts", MOE | {"shared_expert_intermediate_size": 128}),
        Family("Qwen3ForCausalLM", "qwen3", FULL),
        Family("Qwen3MoeForCausalLM", "qwen3_moe", f"{FULL}, experts", MOE),
        Family("GemmaForCausalLM", "gemma", FULL, {"tie_word_embeddings": True}),
        Family(
            "Gemma2ForCausalLM",
            "gemma2",
            "full and sliding window",
            {"sliding_window": 200, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        ),
        Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            "full and sliding window",
            {"sliding_window": 200, "layer_types": WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        ),
        Family("Gemma4ForCausalLM", "gemma4_text", "full and sliding window, layers that share KV", GEMMA),
        Family(
            "Cohere2ForCausalLM",
            "cohere2",
            "full and sliding window",
            {"sliding_window": 200, "layer_types": WINDOWS, "tie_word_embeddings": True},
        ),
        Family("Olmo2ForCausalLM", "olmo2", FULL),
        Family("Olmo3ForCausalLM", "olmo3", "full and sliding window", {"sliding_window": 200, "layer_types": WINDOWS}),
        Family("OlmoeForCausalLM", "olmoe", f"{FULL}, experts", MOE),
        Family("GraniteForCausalLM", "granite", FULL),
        Family("GraniteMoeForCausalLM", "granitemoe", f"{FULL}, experts", {"num_local_experts": 4}),
        Family("Phi3ForCausalLM", "phi3", FULL),
        Family("PhiForCausalLM", "phi", FULL, {"num_key_value_heads": 8}),
        Family("OPTForCausalLM", "opt", FULL, {"ffn_dim": 512, "word_embed_proj_dim": 256}),
        Family(
            "GPT2LMHeadModel",
            "gpt2",
            FULL,
            {"n_embd": 256, "n_head": 8, "n_layer": 4, "n_positions": 4096, "tie_word_embeddings": True},
        ),
        Family("StableLmForCausalLM", "stablelm", FULL),
        Family("Starcoder2ForCausalLM", "starcoder2", FULL, {"sliding_window": None}),
        Family("Glm4ForCausalLM", "glm4", FULL),
        Family("NemotronForCausalLM", "nemotron", FULL),
        Family("SmolLM3ForCausalLM", "smollm3", FULL),
        Family("ArceeForCausalLM", "arcee", FULL),
        Family("Ernie4_5ForCausalLM", "ernie4_5", FULL),
        Family("SeedOssForCausalLM", "seed_oss", FULL),
        Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", FULL),
        Family("ApertusForCausalLM", "apertus", FULL),
        Family(
            "Exaone4ForCausalLM", "exaone4", "full and sliding window", {"sliding_window": 200, "layer_types": WINDOWS}
        ),
        Family("DeepseekV2ForCausalLM", "deepseek_v2", "MLA, experts", MLA, BFLOAT16, tokens=False),
        Family(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            "MLA, experts",
            MLA | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
            BFLOAT16,
            tokens=False,
        ),
        Family(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            "Mamba-2 and full attention",
            {
                "layer_types": ["mamba", "attention"] * 2,
                "num_local_experts": 4,
                "mamba_n_heads": 8,
                "mamba_d_state": 32,
                "mamba_d_head": 64,
                "shared_intermediate_size": 256,
            },
            states=2,
        ),
        Family(
            "FalconH1ForCausalLM",
            "falcon_h1",
            "Mamba-2 beside full attention",
            {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32},
            states=4,
        ),
        Family(
            "NemotronHForCausalLM",
            "nemotron_h",
            "Mamba-2 and full attention",
            {
                "layers_block_type": ["mamba", "attention"] * 2,
                "mamba_num_heads": 8,
                "mamba_head_dim": 64,
                "ssm_state_size": 32,
            },
            states=2,
        ),
        Family(
            "Zamba2ForCausalLM",
            "zamba2",
            "Mamba-2 and full attention",
            {
                "layers_block_type": ["mamba", "hybrid"] * 2,
                "attention_head_dim": 64,
                "mamba_d_state": 32,
                "n_mamba_heads": 8,
                "mamba_headdim": 64,
                "num_mem_blocks": 1,
                "num_key_value_heads": 8,
                "adapter_rank": 16,
            },
            states=4,
        ),
        Family(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            "gated delta net and full attention, experts",
            MOE
            | {
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "shared_expert_intermediate_size": 128,
            },
            options=BFLOAT16,
            tokens=False,
            states=2,
        ),
    )
}

IMAGES = Family(
    "Blip2ForConditionalGeneration",
    "blip-2",
    FULL,
    {
        "image_token_index": 1023,
        "num_query_tokens": 16,
        "qformer_config": TOWER | {"num_hidden_layers": 2, "encoder_hidden_size": 64},
        "text_config": COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "vision_config": TOWER | {"num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
    },
)
"""A model that takes images, and needs no torchvision."""

ASSISTANT = Family(
    "Gemma4AssistantForCausalLM",
    "gemma4_assistant",
    FULL,
    {
        "backbone_hidden_size": COMMON["hidden_size"],
        "text_config": COMMON
        | GEMMA
        | {"model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": WINDOWS[:2], "hidden_size": 128},
    },
)
"""The drafter of the Gemma-4 above. Its layers read the KV of that one's."""


def build(family: Family, path: pathlib.Path) -> None:
    """Write the model's configuration and weights, the same bits each time.

    Each layer keeps the size of its input. Queries and keys are twice as large: attention has peaks, and the tokens
    depend on each layer's KV.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    fields = dict(family.fields)
    config = AutoConfig.for_model(family.model_type, **({} if "text_config" in fields else COMMON) | fields)
    auto = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or "norm" in name or "conv1d" in name:
                continue
            sharp = (
                2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")) else 1.0
            )
            fan_in = 1 if "embed" in name else weight.shape[-1]
            weight.normal_(0, sharp * fan_in**-0.5, generator=generator)
    model.save_pretrained(path)
    described = json.loads((path / "config.json").read_text())
    described["architectures"] = [family.architecture]
    (path / "config.json").write_text(json.dumps(described))
