"""Tiny random checkpoints of other MoE families, made by transformers itself in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.embedded.model import VOCAB_SIZE, write_tokenizer
from tests.engine.reference import in_transformers

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.2,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
"""DeepSeek's attention. On a CPU SGLang knows no other rotary embedding for it than this one (`get_rope_cpu`)."""
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8, "num_key_value_heads": 4},
    "granitemoe": {"num_local_experts": 40, "num_experts_per_tok": 8},
    "glm4_moe": {
        "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_intermediate_size": 32, "head_dim": 16, "n_group": 1, "topk_group": 1,
    },
    "qwen2_moe": {
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
    },
    "deepseek_v2": {
        **_LATENT, "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 32, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
        "routed_scaling_factor": 4.0, "norm_topk_prob": False, "q_lora_rank": None, "scoring_func": "softmax",
    },
    "deepseek_v3": {
        **_LATENT, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_intermediate_size": 32, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 3,
        "q_lora_rank": 48, "scoring_func": "sigmoid",
    },
    "glm4_moe_lite": {
        **_LATENT, "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse", "sparse"], "topk_method": "noaux_tc",
        "n_group": 1, "topk_group": 1, "q_lora_rank": 48, "scoring_func": "sigmoid",
    },
    "gpt_oss": {
        "num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 16, "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4": {
        "text_config": {
            **_COMMON, "num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 1, "head_dim": 16,
            "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "use_qk_norm": False,
        },
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    },
    "qwen3_next": {
        "num_experts": 64, "num_experts_per_tok": 10, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 4, "full_attention_interval": 4, "head_dim": 16, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    },
}  # fmt: skip
ON_CPU = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.engine.on_cpu",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "TORCHDYNAMO_DISABLE": "1",  # Llama 4 and gpt-oss compile what a few lines of torch do
}
"""What some families' servers cannot start without on a CPU."""
_WHOLE = {"llama4": "Llama4ForConditionalGeneration"}
"""SGLang loads these by the configuration of the whole model, of which only the language model's weights are there."""


def write_families(folder: Path, *names: str) -> None:
    """Write each, or those named, into FOLDER/FAMILY."""
    in_transformers(_write, folder, names or tuple(FAMILIES))


def _write(folder: Path, names: tuple[str, ...]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in names:
        sizes, own = FAMILIES[family], folder / family
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **_COMMON | sizes)
        model: Any = AutoModelForCausalLM.from_config(config).to(torch.float32)
        _shift(model)
        model.save_pretrained(own)
        if family in _WHOLE:
            config.update({"architectures": [_WHOLE[family]], "dtype": "float32"})
            config.save_pretrained(own)
        # words of a published config.json that transformers translates and SGLang asks for
        words = sizes | json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps(words))
        write_tokenizer(own)


def _shift(model: Any) -> None:
    """Biases that transformers starts at zero, where adding them twice or never would not be seen.

    SGLang keeps the sinks of attention in bfloat16.
    """
    for name, values in model.state_dict().items():
        if name.endswith(("bias", "sinks")):
            values.copy_(values.normal_(std=0.2).bfloat16())
