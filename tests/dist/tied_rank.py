"""Worker of test_weights_exact.py: the names that one real Megatron rank of a model with tied embeddings gives."""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

import torch

from examples.embedded import megatron
from r3channel.plan.layout import TrainerLayout
from r3channel.weights.convert import hf_shards, hf_weights
from tests.dist.ranks import write_result


def build(layout: TrainerLayout) -> tuple[Any, torch.nn.Module]:
    """A bridge and this rank's part of a dense Qwen3 of two layers."""
    from mbridge.models.qwen3 import Qwen3Bridge
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import Qwen3Config

    from examples.embedded.megatron_modules import use_local_modules

    shape: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    hf: Any = Qwen3Config(**shape, **heads, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"])
    values = {key: value for key, value in megatron.LOCAL_CONFIG.items() if not key.startswith("moe")}
    own = TransformerConfig(
        **values,
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        ffn_hidden_size=128,
        qk_layernorm=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(
        own,
        use_local_modules(get_gpt_decoder_block_spec(own, use_transformer_engine=False)),
        vocab_size=128,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )

    class Bridge(Qwen3Bridge):
        _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
            **Qwen3Bridge._MLP_MAPPING,
            "pre_mlp_layernorm": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
        }

        def _build_config(self) -> Any:
            return own

    return Bridge(hf, dtype=torch.float32), model


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    layout = TrainerLayout.parse(job["layout"])
    megatron.init_distributed(
        rank=job["rank"], world_size=job["world_size"], init_method=job["init_method"], layout=layout
    )
    bridge, model = build(layout)
    names = [name for name, _ in hf_weights(bridge, [model])]
    shards = [shard.meta.name for shard in hf_shards(bridge, [model])]
    megatron.close_distributed()
    write_result(job, {"names": names, "shards": shards})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
