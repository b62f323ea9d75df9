"""Tiny random checkpoints of other MoE families, made by transformers itself in a process of its own.

python families.py FOLDER        writes each into FOLDER/FAMILY
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from r3channel.embedded.model import VOCAB_SIZE, write_tokenizer
from r3channel.embedded.sglang import environment

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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
}  # fmt: skip


def write_families(folder: Path) -> None:
    """One process for all: importing transformers takes most of the time."""
    command = [sys.executable, __file__, str(folder)]
    subprocess.run(command, env=environment(r3channel=False), check=True, timeout=120)


def main(folder: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for family, sizes in FAMILIES.items():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_COMMON | sizes))
        model.to(torch.float32).save_pretrained(Path(folder, family))
        write_tokenizer(Path(folder, family))


if __name__ == "__main__":
    main(*sys.argv[1:])
