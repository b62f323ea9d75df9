"""What a Hugging Face configuration says of a model's routing: layers, MoE layers, experts, top-k. Nothing is imported.

Families say it in different words, so the words are data: each placement key with its meaning, and each family with what
holds when its `config.json` leaves the key out. What is in neither table is an error that names the keys, never a guess.
The tables were read in transformers 5.19.0 (`configuration_*.py`, `modeling_*.py`); a test holds them against every
MoE model that the installed transformers builds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError

_NESTED = ("text_config", "thinker_config", "llm_config", "language_config")
"""Keys under which a multimodal configuration keeps that of its language model."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers")  # LongCat, DBRX
# ERNIE, Aria and DBRX have the last.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",  # Kimi-Linear
    "moe_top_k",  # DBRX, Step
    "moe_topk",  # Aria, Hunyuan, LongCat
    "moe_k",  # ERNIE
    "top_k_experts",  # Gemma 4
)
# Gemma 4, Doge: false in a dense model that has the other keys all the same.
_SWITCHES = ("enable_moe_block", "is_moe")

# -- which layers are MoE --------------------------------------------------------------------------------------------------

Listed = Callable[[Any, int], Sequence[bool]]
_SPARSE = {"sparse", "moe", "hash_moe"}
_DENSE = {"dense", "mlp", "linear_attention", "full_attention", "mamba", "attention"}


def _words(value: Sequence[str], _: int) -> list[bool]:
    if unknown := set(value) - _SPARSE - _DENSE:
        raise ConfigError(f"layer types {sorted(unknown)}: expected {sorted(_SPARSE)} or {sorted(_DENSE)}")
    return [word in _SPARSE for word in value]


def _indices(value: str | Sequence[int], layers: int) -> list[bool]:
    chosen = {int(item) for item in (value.split(",") if isinstance(value, str) else value)}
    return [layer in chosen for layer in range(layers)]


_LISTED: dict[str, Listed] = {
    "mlp_layer_types": _words,  # transformers' own key; wins over all others (ExaoneMoeConfig)
    # NemotronHConfig, from 5 on and before: attention and MLP are layers of their own.
    "layers_block_type": _words,
    "hybrid_override_pattern": lambda value, _: [letter == "E" for letter in value],
    "moe_layers": _indices,  # Llama4TextConfig
    "moe_layers_enum": _indices,  # Step3p7TextConfig: "3,4,5"
    "is_moe_layer": lambda value, _: [bool(item) for item in value],  # EXAONE-MoE's own config.json
    "moe_layer_freq": lambda value, _: [bool(item) for item in value],  # as a list: MiMo-V2, MiniMax-M3
}
"""Keys that say layer by layer whether there is a router. The first that is given decides alone."""
_BLOCKS = {"layers_block_type", "hybrid_override_pattern"}  # their length counts the layers (NemotronHConfig)


Narrowing = Callable[[int, Any, Mapping[str, Any]], bool]
_NARROWING: dict[str, Narrowing] = {
    "first_k_dense_replace": lambda layer, value, _: layer >= value,  # DeepseekV3DecoderLayer
    "num_dense_layers": lambda layer, value, _: layer >= value,  # AfmoeDecoderLayer, Lfm2MoeDecoderLayer
    "dense_mlp_idx": lambda layer, value, _: layer >= value,  # InklingTextConfig
    "mlp_only_layers": lambda layer, value, _: layer not in value,  # Qwen2MoeDecoderLayer
    "decoder_sparse_step": lambda layer, value, _: (layer + 1) % value == 0,  # Qwen2MoeDecoderLayer
    "moe_layer_freq": lambda layer, value, _: layer % value == 0,  # as a number: DeepSeek, AXK2Config
    "interleave_moe_layer_step": lambda layer, value, _: (layer + 1) % value == 0,  # Llama4TextConfig
    "expert_layer_period": lambda layer, value, text: layer % value == (text.get("expert_layer_offset") or 0),  # JambaConfig
    "moe_layer_interval": lambda layer, value, _: (layer + 1) % value == 0,  # Ernie4_5_MoeDecoderLayer
    "moe_layer_start_index": lambda layer, value, _: layer >= value,  # Ernie4_5_MoeDecoderLayer
    "moe_layer_end_index": lambda layer, value, text: layer <= value or value == -1,  # Ernie4_5_MoeConfig: -1 is the last
}  # fmt: skip
"""Keys that take layers away. All that are given hold together."""

PLACEMENT_KEYS = frozenset(_LISTED.keys() | _NARROWING.keys())

_BESIDE = {
    "expert_layer_offset",  # read with expert_layer_period
    "mtp_mlp_layer_types",  # of MTP layers, which are not counted
    "mtp_layers_block_type",
    "mtp_hybrid_override_pattern",
    "prefix_dense_sliding_window_pattern",  # Cohere2MoeConfig: of attention
}
"""Keys that sound like placement, and are read elsewhere or say nothing of these layers."""
_SUSPECT = re.compile(
    r"(moe|expert|sparse|dense|mlp|ffn|zaya).*(layer|step|freq|period|offset|interval|pattern|types$|start|end|idx|enum)"
    r"|layer.*(moe|expert|sparse|dense|mlp|ffn)|layers?_block_types?|override_pattern"
)

_EVERY: dict[str, Any] = {}
_AFTER_ONE: dict[str, Any] = {"first_k_dense_replace": 1}
_AFTER_THREE: dict[str, Any] = {"first_k_dense_replace": 3}

FAMILIES: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("aria_text", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v4"), _EVERY),
    **dict.fromkeys(("diffusion_gemma_text", "dots1", "flex_olmo", "gemma4_text", "gpt_oss", "granitemoe"), _EVERY),
    **dict.fromkeys(("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe"), _EVERY),
    **dict.fromkeys(("inkling_text", "longcat_flash", "mellum", "minimax", "minimax_m2"), _EVERY),
    **dict.fromkeys(("minimax_m3_vl_text", "mistral4", "mixtral", "olmoe", "openai_privacy_filter", "phimoe"), _EVERY),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_vl_moe_text"), _EVERY),
    **dict.fromkeys(("qwen3_omni_moe_text", "qwen3_omni_moe_talker_text", "qwen4_exp_text"), _EVERY),
    **dict.fromkeys(("solar_open", "zaya"), _EVERY),
    **dict.fromkeys(("axk1", "axk2", "exaone_moe", "ernie4_5_vl_moe_text", "glm4_moe", "glm4_moe_lite"), _AFTER_ONE),
    **dict.fromkeys(("glm4v_moe_text", "hy_v3", "hy_v4", "kimi_linear", "laguna", "mimo_v2_flash"), _AFTER_ONE),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm5_next_text", "step3p5"), _AFTER_THREE),
    "afmoe": {"num_dense_layers": 1},
    "lfm2_moe": {"num_dense_layers": 2},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    "jamba": {"expert_layer_period": 2, "expert_layer_offset": 1},
    "llama4_text": {"interleave_moe_layer_step": 1},
}  # fmt: skip
"""By `model_type`: what holds when a configuration gives no placement key (the defaults of the family's config class)."""

_REFUSED = {
    "jetmoe": "its attention has a router of its own, so a layer has two",
    "doge": "its router names product keys, not experts",
}
# Fields that a family's model never reads.
_DEAD = {"qwen3_omni_moe_talker_text": {"decoder_sparse_step", "mlp_only_layers"}}
_SKIPPING = {"zaya": 1}  # ZayaRouter has one class more than there are experts: the token skips the layer


def read(config: Any) -> dict[str, Any]:
    """Read the fields of a `RoutingSpec` from a Hugging Face configuration.

    Args:
        config: a mapping, an object with `to_dict()`, a checkpoint folder, or the path of its config.json.

    Returns:
        The fields. `num_experts` counts all that an id may name, also the experts of LongCat and Zaya that compute nothing.

    Raises:
        ConfigError: the configuration cannot be read, or does not say which layers are MoE.
    """
    text = _language_model(_mapping(config))
    try:
        return _placement(text)
    except ConfigError as error:
        raise error.prefix(f"model type {text.get('model_type')!r}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        said = f"{error}; {_keys(text)}. A value is not of the kind that its key means"
        raise ConfigError(f"model type {text.get('model_type')!r}: {said}") from error


def _placement(text: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(text)
    experts, top_k = _number(text, _EXPERTS), _number(text, _TOP_K)
    if experts < 2 or not top_k or any(text.get(key) is False for key in _SWITCHES):
        raise ConfigError(f"no number of experts or top-k in the config; is this an MoE model? {_keys(text)}")
    moe = _pattern(text)
    extra = (text.get("zero_expert_num") or 0) + _SKIPPING.get(_family(text), 0)
    layers = tuple(compress(range(len(moe)), moe))
    return {"num_layers": len(moe), "moe_layers": layers, "num_experts": experts + extra, "top_k": top_k}


def _mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str | Path):
        return _file(Path(config))
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"a config of type {type(config).__name__}, expected a mapping, an object with to_dict(), or a checkpoint folder"
        )
    return found


def _file(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        return _mapping(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a checkpoint folder or a readable config.json: {error}") from error


def _language_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    while inner := next((values[key] for key in _NESTED if values.get(key)), None):
        values = _mapping(inner)
    feed_forward = values.get("ffn_config")  # DBRX
    return {**_mapping(feed_forward), **values} if feed_forward else values


def _refuse(text: Mapping[str, Any]) -> None:
    if text.get("is_encoder_decoder"):
        raise ConfigError("an encoder and a decoder, both with routers; rows have one layer axis")
    if reason := _REFUSED.get(_family(text)):
        raise ConfigError(reason)
    # Numbers, lists and words may place layers; a flag or a fraction does not.
    told = {key for key, value in text.items() if value and not isinstance(value, bool | float | Mapping)}
    unread = sorted(filter(_SUSPECT.search, told - PLACEMENT_KEYS - _BESIDE))
    if unread and not text.get("mlp_layer_types"):
        raise ConfigError(
            f"{', '.join(unread)} may say which layers are MoE, and is not understood. {_WAY_OUT}"
        )


_WAY_OUT = "Say it in the config as mlp_layer_types, a list of 'dense' or 'sparse' for each layer"


def _number(text: Mapping[str, Any], keys: Sequence[str]) -> int:
    given = {key: text[key] for key in keys if text.get(key) is not None}
    lists = [value if isinstance(value, list | tuple) else [value] for value in given.values()]
    found = {*map(int, chain.from_iterable(lists))}
    if len(found) > 1:
        raise ConfigError(f"{given}, expected one number for all layers")
    return found.pop() if found else 0


def _pattern(text: Mapping[str, Any]) -> Sequence[bool]:
    """Return for each decoder layer whether it has a router."""
    layers = _number(text, _LAYERS)
    for key, listed in _LISTED.items():
        value = text.get(key)
        if value is None or isinstance(value, int):
            continue
        found, wanted = listed(value, layers), 0 if key in _BLOCKS else layers
        if len(found) < wanted:
            raise ConfigError(f"{key} has {len(found)} entries for {layers} layers")
        # Some files list their MTP layers after the others (Step-3.7, DeepSeek-V4): these are cut.
        return found[: wanted or len(found)]
    return _narrow(layers, text)


def _narrow(layers: int, text: Mapping[str, Any]) -> Sequence[bool]:
    given = {key: value for key, value in text.items() if value is not None}
    keys = _NARROWING.keys() - _DEAD.get(_family(text), set())
    if not layers or (_family(text) not in FAMILIES and not keys & given.keys()):
        raise ConfigError(f"nothing known says which layers are MoE; {_keys(text)}. {_WAY_OUT}")
    if _family(text) not in FAMILIES and given.get("moe_layer_freq", 1) > 1:
        raise ConfigError(
            f"moe_layer_freq {given['moe_layer_freq']} counts from layer 0 in some families (DeepSeek), "
            f"from the first MoE layer in others (Sarvam). {_WAY_OUT}"
        )
    merged = {**FAMILIES.get(_family(text), {}), **given}
    rules = [(_NARROWING[key], merged[key]) for key in keys & merged.keys()]
    return [all(holds(layer, value, merged) for holds, value in rules) for layer in range(layers)]


def _family(text: Mapping[str, Any]) -> str:
    return text.get("model_type") or ""


def _keys(text: Mapping[str, Any]) -> str:
    told = sorted(key for key in text if key in PLACEMENT_KEYS or re.search("expert|moe|layer|top_?k", key))
    return f"keys seen: {', '.join(told) or 'none of experts or layers'}"
