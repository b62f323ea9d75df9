"""The table of models: its byte columns are those of the project's survey of published configurations."""

from __future__ import annotations

import pytest

from r3channel.errors import ConfigError
from r3channel.model.presets import MODELS, model_named

SURVEY = {  # name: (MoE layers, packed bytes, bytes of the id dtype, stock int32 bytes), all per token
    "qwen3-30b-a3b": (48, 336, 384, 1536),
    "qwen3-235b-a22b": (94, 658, 752, 3008),
    "qwen3-next": (48, 540, 960, 1920),
    "qwen3.5-35b-a3b": (40, 320, 320, 1280),
    "qwen3.5-122b-a10b": (48, 384, 384, 1536),
    "qwen3.5-397b-a17b": (60, 675, 1200, 2400),
    "deepseek-v3": (58, 464, 464, 1952),
    "deepseek-v4-flash": (43, 258, 258, 1032),
    "deepseek-v4-pro": (61, 412, 732, 1464),
    "glm-4.5-air": (45, 315, 360, 1472),
    "glm-4.5": (89, 712, 712, 2944),
    "glm-4.7-flash": (46, 138, 184, 752),
    "glm-5": (75, 600, 600, 2496),
    "kimi-k2": (60, 540, 960, 1952),
    "moonlight-16b-a3b": (26, 117, 156, 648),
    "minimax-m2": (62, 496, 496, 1984),
    "gpt-oss-20b": (24, 60, 96, 384),
    "gpt-oss-120b": (36, 126, 144, 576),
    "mixtral-8x7b": (32, 24, 64, 256),
    "llama-4-scout": (48, 24, 48, 192),
    "llama-4-maverick": (24, 21, 24, 192),
    "step-3.5-flash": (42, 378, 672, 1440),
    "ling-1t": (76, 608, 608, 2560),
    "mimo-v2-flash": (47, 376, 376, 1536),
    "nemotron-3-super-120b": (40, 990, 1760, 7744),
}


def test_every_model_has_the_bytes_of_the_survey() -> None:
    found = {}
    for name, model in MODELS.items():
        spec = model.spec
        packed_bits = spec.num_moe_layers * model.top_k * (model.num_experts - 1).bit_length()
        int32_of_all_layers = model.num_layers * model.top_k * 4
        found[name] = (spec.num_moe_layers, -(-packed_bits // 8), spec.bytes_per_token, int32_of_all_layers)
    assert found == SURVEY


def test_what_nobody_has_verified_says_so() -> None:
    assert {model.status for model in MODELS.values()} == {"read", "quoted", "unverified"}
    assert model_named("llama-4-maverick").status == "unverified"


def test_an_alias_is_the_same_model_and_an_unknown_name_lists_the_known() -> None:
    assert model_named("Kimi-K2.5") is MODELS["kimi-k2"]
    with pytest.raises(ConfigError, match="qwen3-30b-a3b"):
        model_named("qwen4")
