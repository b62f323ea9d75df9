"""What a configuration says of routing: published ones by their own words, what is refused instead of guessed, sizes in bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from r3channel.errors import ConfigError
from r3channel.model.presets import MODELS, model_named
from r3channel.model.spec import RoutingSpec

QWEN = {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
DEEPSEEK = {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3, "n_shared_experts": 1,
    "n_group": 8, "topk_group": 4,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "num_hidden_layers": 48, **QWEN},
    "qwen3-next": {"model_type": "qwen3_next", "num_hidden_layers": 48, **QWEN, "num_experts": 512, "num_experts_per_tok": 10},
    "deepseek-v3": {"model_type": "deepseek_v3", "num_hidden_layers": 61, **DEEPSEEK},
    "kimi-k2": {
        "model_type": "kimi_k2", "num_hidden_layers": 61, **DEEPSEEK, "n_routed_experts": 384, "first_k_dense_replace": 1
    },
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4},
    "minimax-m2": {"model_type": "minimax_m2", "num_hidden_layers": 62, "num_local_experts": 256, "num_experts_per_tok": 8},
    "llama-4-maverick": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text", "num_hidden_layers": 48, "num_local_experts": 128, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
    },
    "step-3.5-flash": {
        "model_type": "step3p5", "num_hidden_layers": 45, "moe_num_experts": 288, "moe_top_k": 8,
        "moe_layers_enum": ",".join(str(layer) for layer in range(3, 45)),
    },
    "mimo-v2-flash": {
        "model_type": "mimo_v2_flash", "num_hidden_layers": 48, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_layer_freq": [0] + [1] * 47,
    },
}  # fmt: skip
"""In the words of the checkpoints' own config.json; the numbers are those of `models`, where their status is told."""

PLAIN = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_gives_the_models_routing(name: str) -> None:
    assert RoutingSpec.from_hf_config(PUBLISHED[name]) == model_named(name).spec


def test_nemotrons_pattern_is_its_layers() -> None:
    words = {"model_type": "nemotron_h", "n_routed_experts": 8, "num_experts_per_tok": 2}
    spec = RoutingSpec.from_hf_config({**words, "hybrid_override_pattern": "MEM*-EME"})
    assert (spec.num_layers, spec.moe_layers) == (8, (1, 5, 7))
    blocks = ["linear_attention", "moe", "full_attention", "mlp"]
    assert RoutingSpec.from_hf_config({**words, "layers_block_type": blocks}).moe_layers == (1,)


def test_the_way_out_that_an_error_names_is_one_and_wins_over_counts() -> None:
    config = PLAIN | {"model_type": "brand_new", "moe_every_n_layers": 2, "first_k_dense_replace": 3}
    with pytest.raises(ConfigError, match="Say it in the config as mlp_layer_types"):
        RoutingSpec.from_hf_config(config)
    told = config | {"mlp_layer_types": ["dense", "sparse"] * 2}
    assert RoutingSpec.from_hf_config(told).moe_layers == (1, 3)


def test_experts_that_compute_nothing_are_ids_too() -> None:
    config = {"model_type": "longcat_flash", "num_layers": 28, "n_routed_experts": 512, "moe_topk": 12}
    assert RoutingSpec.from_hf_config(config | {"zero_expert_num": 256}).num_experts == 768


@pytest.mark.parametrize(
    "given",
    [
        lambda config, folder: config, lambda config, folder: folder, lambda config, folder: str(folder),
        lambda config, folder: folder / "config.json", lambda config, folder: SimpleNamespace(to_dict=lambda: config),
        lambda config, folder: {"vision_config": {}, "text_config": SimpleNamespace(to_dict=lambda: config)},
        lambda config, folder: {"thinker_config": {"text_config": config}, "talker_config": {}},
    ],
)  # fmt: skip
def test_a_mapping_an_object_and_a_folder_are_read_alike(given: Callable[..., Any], tmp_path: Path) -> None:
    config = PUBLISHED["qwen3-30b-a3b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert RoutingSpec.from_hf_config(given(config, tmp_path)) == model_named("qwen3-30b-a3b").spec


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PLAIN | {"model_type": "brand_new"}, r"brand_new.*nothing known.*keys seen: num_experts"),
        (PLAIN | {"model_type": "mixtral", "moe_every_n_layers": 2}, "moe_every_n_layers may say"),
        (PLAIN | {"model_type": "mixtral", "ffn_block_pattern": "DS"}, "ffn_block_pattern may say"),
        (PLAIN | {"model_type": "zaya", "zaya_layers": ["a", 16]}, "zaya_layers may say"),
        (PLAIN | {"mlp_layer_types": ["dense", "sparse", "swarm", "dense"]}, r"\['swarm'\]"),
        (PLAIN | {"mlp_layer_types": ["dense", "sparse"]}, "2 entries for 4 layers"),
        (PLAIN | {"model_type": "mixtral", "num_local_experts": 16}, "8, 'num_local_experts': 16"),
        (PLAIN | {"model_type": "hunyuan_v1_moe", "num_experts": [8, 8, 16, 8]}, "one number for all"),
        (PLAIN | {"moe_layer_freq": 2}, "counts from layer 0 in some families"),
        (PLAIN | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (PLAIN | {"first_k_dense_replace": "three"}, "first_k_dense_replace"),
        (PLAIN | {"model_type": "gemma4_text", "enable_moe_block": False}, "is this an MoE model"),
        (PLAIN | {"model_type": "nllb-moe", "is_encoder_decoder": True}, "encoder and a decoder"),
        (PLAIN | {"model_type": "jetmoe"}, "a layer has two"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "llama.*is this an MoE model"),
        (PLAIN | {"first_k_dense_replace": 4}, "at least one layer"),
    ],
)
def test_what_is_not_known_is_refused_with_its_keys(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RoutingSpec.from_hf_config(config)


def test_a_folder_without_a_config_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}: not a checkpoint folder"):
        RoutingSpec.from_hf_config(tmp_path)
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        RoutingSpec.from_hf_config(SimpleNamespace(num_experts=8))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="list"):
        RoutingSpec.from_hf_config(tmp_path)


# -- the spec itself, and Megatron's configuration -----------------------------------------------------------------------


def test_megatron_frequency_as_number_and_as_list_give_the_same_layers() -> None:
    common = {"num_layers": 4, "num_moe_experts": 8, "moe_router_topk": 2}
    by_list = RoutingSpec.from_megatron(SimpleNamespace(moe_layer_freq=[1, 0, 1, 0], **common))
    by_number = RoutingSpec.from_megatron(SimpleNamespace(moe_layer_freq=2, **common))
    assert by_list == by_number and by_list.moe_layers == (0, 2)


def test_digest_differs_with_any_field_and_survives_a_round_trip() -> None:
    spec = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)
    changes: dict[str, Any] = {"num_layers": 5, "moe_layers": (0, 2, 3), "num_experts": 64, "top_k": 4}
    assert len({spec.digest, *(replace(spec, **{n: v}).digest for n, v in changes.items())}) == 5
    assert RoutingSpec.from_dict(spec.to_dict()).digest == spec.digest


@pytest.mark.parametrize(
    "changes",
    [{"moe_layers": ()}, {"moe_layers": (2, 1)}, {"moe_layers": (4,)}, {"top_k": 0}, {"top_k": 129}],
)
def test_impossible_spec_is_refused(changes: dict) -> None:
    values = {"num_layers": 4, "moe_layers": (1, 2, 3), "num_experts": 128, "top_k": 8} | changes
    with pytest.raises(ConfigError):
        RoutingSpec(**values)


# -- the table of models: its byte columns are those of the project's survey of published configurations ----------------------

SURVEY = {  # name: (MoE layers, packed bytes, bytes of the id dtype, stock int32 bytes), all per token
    "qwen3-30b-a3b": (48, 336, 384, 1536), "qwen3-235b-a22b": (94, 658, 752, 3008), "qwen3-next": (48, 540, 960, 1920),
    "qwen3.5-35b-a3b": (40, 320, 320, 1280), "qwen3.5-122b-a10b": (48, 384, 384, 1536),
    "qwen3.5-397b-a17b": (60, 675, 1200, 2400), "deepseek-v3": (58, 464, 464, 1952),
    "deepseek-v4-flash": (43, 258, 258, 1032), "deepseek-v4-pro": (61, 412, 732, 1464),
    "glm-4.5-air": (45, 315, 360, 1472), "glm-4.5": (89, 712, 712, 2944), "glm-4.7-flash": (46, 138, 184, 752),
    "glm-5": (75, 600, 600, 2496), "kimi-k2": (60, 540, 960, 1952), "moonlight-16b-a3b": (26, 117, 156, 648),
    "minimax-m2": (62, 496, 496, 1984), "gpt-oss-20b": (24, 60, 96, 384), "gpt-oss-120b": (36, 126, 144, 576),
    "mixtral-8x7b": (32, 24, 64, 256), "llama-4-scout": (48, 24, 48, 192), "llama-4-maverick": (24, 21, 24, 192),
    "step-3.5-flash": (42, 378, 672, 1440), "ling-1t": (76, 608, 608, 2560), "mimo-v2-flash": (47, 376, 376, 1536),
    "nemotron-3-super-120b": (40, 990, 1760, 7744),
}  # fmt: skip


def test_every_model_has_the_bytes_of_the_survey() -> None:
    found = {}
    for name, model in MODELS.items():
        spec = model.spec
        packed_bits = spec.num_moe_layers * model.top_k * (model.num_experts - 1).bit_length()
        int32_of_all_layers = model.num_layers * model.top_k * 4
        found[name] = (spec.num_moe_layers, -(-packed_bits // 8), spec.bytes_per_token, int32_of_all_layers)
    assert found == SURVEY


def test_an_alias_is_the_same_model_and_an_unknown_name_lists_the_known() -> None:
    assert model_named("Kimi-K2.5") is MODELS["kimi-k2"]
    with pytest.raises(ConfigError, match="qwen3-30b-a3b"):
        model_named("qwen4")
