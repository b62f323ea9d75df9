"""A DeepSeek-V3-like model of real Megatron, sharded, exported under Hugging Face names.

Every rank writes digests of what it was given; on one rank the folder is written whole, with the log-probs of a batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from r3channel.plan.layout import TrainerLayout
from r3channel.weights.checksums import tensor_checksum
from r3channel.weights.convert import hf_weights
from tests.dist import deepseek


def hf_config() -> Any:
    from transformers import DeepseekV3Config

    values: dict[str, Any] = {
        "vocab_size": deepseek.VOCAB, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
        "num_hidden_layers": deepseek.LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_shared_experts": 1, "n_routed_experts": deepseek.EXPERTS, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": deepseek.TOP_K, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "attention_bias": False, "architectures": ["DeepseekV3ForCausalLM"],
    }  # fmt: skip
    return DeepseekV3Config(**values)


def bridge_of(config: Any, own: Any) -> Any:
    """mbridge's names and formats; the model is the tests' own."""
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge  # after the CPU shim

    class Bridge(DeepseekV3Bridge):
        def _build_config(self) -> Any:
            return own

    return Bridge(config, dtype=torch.float32)


def whole_model(model: Any, config: Any, exported: dict[str, torch.Tensor], folder: Path) -> None:
    """What a reader of the folder needs, and the log-probs that Megatron gives."""
    config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in exported.items()}, folder / "model.safetensors")
    tokens = torch.randint(0, deepseek.VOCAB, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model.eval()(tokens, torch.arange(16).expand_as(tokens), None)
    save_file(
        {"tokens": tokens, "logprobs": logits.float().log_softmax(-1).contiguous()}, folder / "expected.st"
    )


def export(job: dict[str, Any], layout: TrainerLayout) -> dict[str, Any]:
    """What this rank was given of the model, and the tensors that bfloat16 leaves as they are."""
    config, model = hf_config(), deepseek.build(mtp_num_layers=None)
    bridge = bridge_of(config, model.config)
    exported = {name: tensor.clone() for name, tensor in hf_weights(bridge, [model])}
    narrow = dict(hf_weights(bridge, [model], dtype=torch.bfloat16))
    if layout.world_size == 1:
        (folder := Path(job["out"]) / "hf").mkdir()
        whole_model(model, config, exported, folder)
    digests = {name: [list(tensor.shape), tensor_checksum(tensor)] for name, tensor in exported.items()}
    kept = sorted(name for name, tensor in narrow.items() if tensor.dtype == torch.float32)
    return {"digests": digests, "float32": kept}
