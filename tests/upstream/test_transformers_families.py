"""`RoutingSpec.from_hf_config` against the models that transformers builds: every family with experts, found by scanning.

The truth is a model on meta tensors: which decoder layers hold experts, how many, and how many its router takes. A family
that a newer transformers adds is found by the scan, and fails here by its name until `hf_config` knows it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from examples.embedded.megatron_shim import declare_torchvision_operators
from r3channel.errors import ConfigError
from r3channel.model.hf_config import FAMILIES, PLACEMENT_KEYS
from r3channel.model.presets import model_named
from r3channel.model.spec import RoutingSpec

LAYERS = 8
"""Layers of the variants, and of each list below."""

_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64}
_ROUTED = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
NEEDS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 6, "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1), "num_hidden_layers": LAYERS,
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "diffusion_gemma_text": _ROUTED,
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gemma4_text": {"enable_moe_block": True, **_ROUTED},
    "hunyuan_v1_moe": {
        "num_experts": 16, "moe_topk": [4] * LAYERS, "head_dim": 128, "num_hidden_layers": LAYERS
    },
    "lfm2_moe": {"layer_types": ["conv"] * LAYERS, "num_hidden_layers": LAYERS},
    "qwen3_omni_moe": {"enable_audio_output": False},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "qwen4_exp_text": {"indexer_compress_ratio": 4, **_INDEXER},
}  # fmt: skip
"""What the defaults of a configuration class leave out, so that no model can be built of them."""

REFUSED = {
    "doge": "product keys", "jetmoe": "has two", "nllb-moe": "encoder", "switch_transformers": "encoder",
    "vitpose": "no number of experts", "vitpose_backbone": "no number of experts",
}  # fmt: skip
"""Families with experts in their configuration for which there is no spec, and a word of the refusal."""

SAME_AS_DEFAULTS = {
    "deepseek-v3": "deepseek_v3", "deepseek-v4-flash": "deepseek_v4", "glm-4.5-air": "glm4_moe",
    "glm-4.7-flash": "glm4_moe_lite", "glm-5": "glm_moe_dsa", "gpt-oss-120b": "gpt_oss",
    "llama-4-scout": "llama4", "mimo-v2-flash": "mimo_v2_flash", "minimax-m2": "minimax_m2",
    "mixtral-8x7b": "mixtral", "qwen3-next": "qwen3_next", "qwen3.5-35b-a3b": "qwen3_5_moe",
    "step-3.5-flash": "step3p5",
}  # fmt: skip
"""Models of the built-in table whose numbers are the defaults of their family's configuration class."""

_MOE_OF_8 = [0, 1, 0, 0, 1, 1, 0, 1]
_WORDS = {"deepseek_v4": ("hash_moe", "moe"), "nemotron_h": ("mlp", "moe")}
VARIANTS: dict[str, Any] = {
    "first_k_dense_replace": 2, "num_dense_layers": 3, "mlp_only_layers": [1, 4], "decoder_sparse_step": 2,
    "interleave_moe_layer_step": 2, "moe_layers": [1, 5], "expert_layer_period": 3, "expert_layer_offset": 0,
    "moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 5,
}  # fmt: skip
"""Another value for each placement key that a configuration class has as a field."""

OLD_WORDS: list[tuple[str, dict[str, Any]]] = [
    ("axk2", {"first_k_dense_replace": 2}),
    ("axk2", {"moe_layer_freq": 2, "first_k_dense_replace": 3}),
    ("cohere2_moe", {"first_k_dense_replace": 2}),
    ("inkling_text", {"dense_mlp_idx": 2}),
    ("kimi_linear", {"first_k_dense_replace": 2}),
    ("minimax_m3_vl_text", {"moe_layer_freq": _MOE_OF_8}),
    ("step3p5", {"moe_layers_enum": "3,5,7"}),
    ("step3p5", {"moe_layers_enum": [2, 7]}),
    ("nemotron_h", {"hybrid_override_pattern": "MEM*-EME"}),
]
"""What checkpoints say in their config.json, and a configuration class translates."""


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    """A configuration of each family that speaks of experts."""
    declare_torchvision_operators()
    import huggingface_hub.constants
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
    from transformers.utils import logging

    logging.set_verbosity_error()
    with pytest.MonkeyPatch.context() as patch:
        # a class without experts asks the hub
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        found = {name: _config(name) for name in list(CONFIG_MAPPING_NAMES)}
    configs = {name: config for name, config in found.items() if config is not None}
    return {name: config for name, config in configs.items() if _speaks_of_experts(config.to_dict())}


def _config(name: str) -> Any:
    """None for a class that wants parts or packages which are not here, none of them of a language model with experts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        cls: Any = CONFIG_MAPPING[name]
        config = cls(**NEEDS.get(name, {}))
    except Exception:
        return None
    family = (config.to_dict().get("text_config") or {}).get("model_type", "")
    return cls(text_config={"model_type": family, **NEEDS[family]}) if family in NEEDS else config


def _speaks_of_experts(values: Mapping[str, Any]) -> bool:
    return any(
        "expert" in str(key) or (isinstance(value, Mapping) and _speaks_of_experts(value))
        for key, value in values.items()
    )


# -- the truth -------------------------------------------------------------------------------------------------------------


def built(config: Any) -> RoutingSpec:
    """From the layers of the model itself."""
    stack = next(_stacks(_model(config)), None)
    assert stack is not None, "the model has no layer with experts"
    blocks = {index: block for index, layer in enumerate(stack) if (block := _block(layer)) is not None}
    sizes = {(_experts(block), _top_k(block)) for block in blocks.values()}
    assert len(sizes) == 1, f"experts and top-k differ between layers: {sizes}"
    ((experts, top_k),) = sizes
    return RoutingSpec(num_layers=len(stack), moe_layers=tuple(blocks), num_experts=experts, top_k=top_k)


def _model(config: Any) -> torch.nn.Module:
    errors: list[str] = []
    for cls in _model_classes(config):
        try:
            with torch.device("meta"):
                return cls._from_config(config)
        except Exception as error:
            errors.append(f"{cls.__name__}: {type(error).__name__}: {error}")
    raise AssertionError(f"no model class builds: {errors[:3]}")


def _model_classes(config: Any) -> Iterator[Any]:
    """Those of the family's own module, for this class of configuration."""
    from transformers import PreTrainedModel

    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    classes: list[Any] = [
        cls for _, cls in inspect.getmembers(module, inspect.isclass) if issubclass(cls, PreTrainedModel)
    ]
    fits = [cls for cls in classes if cls.config_class is type(config) and "PreTrained" not in cls.__name__]
    yield from sorted(fits, key=lambda cls: ("For" in cls.__name__, len(cls.__name__)))


def _stacks(model: torch.nn.Module) -> Iterator[torch.nn.ModuleList]:
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and any(_block(layer) is not None for layer in module):
            yield module


def _block(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The module that holds the experts of one layer; its parent in two families that route beside the block."""
    return next((module for module in layer.modules() if "experts" in dict(module.named_children())), None)


def _router(block: torch.nn.Module) -> torch.nn.Module:
    children = dict(block.named_children())
    return next(children[name] for name in ("gate", "router") if name in children)


def _experts(block: torch.nn.Module) -> int:
    """Classes of a router that may skip its layer (Zaya), else rows of the experts' own parameters."""
    classes = getattr(_router(block), "num_router_classes", None)
    experts: Any = block.get_submodule("experts")
    rows = max((value.shape[0] for value in experts.parameters() if value.dim() == 3), default=0)
    return classes or rows or experts.num_experts


def _top_k(block: torch.nn.Module) -> int:
    router = _router(block)
    found: Any = getattr(router, "top_k", None) or getattr(block, "top_k", None)
    config: Any = getattr(router, "config", None)
    return found or config.top_k_experts  # Gemma 4 keeps the number in its configuration only


# -- the facts -------------------------------------------------------------------------------------------------------------


def test_every_family_of_transformers_is_read_as_it_is_built(families: dict[str, Any]) -> None:
    names = sorted(families.keys() - REFUSED.keys())
    assert_as_built([(name, families[name], families[name]) for name in names])
    assert len(names) > 60


def test_each_placement_key_is_read_as_it_is_built(families: dict[str, Any]) -> None:
    cases = [(name, case, case) for name in sorted(families) for case in _variants(name, families[name])]
    assert_as_built(cases)
    assert len(cases) > 40


def test_the_old_words_of_a_config_json_are_read_as_they_are_built(families: dict[str, Any]) -> None:
    cases = [(f"{name} {words}", _short(name, families[name], **words), words) for name, words in OLD_WORDS]
    assert_as_built([(told, config, _without_keys(config) | words) for told, config, words in cases])


def assert_as_built(cases: list[tuple[str, Any, Any]]) -> None:
    """(what is told of a fault, the configuration that is built, what is read)."""
    wrong = [text for case in cases if (text := _difference(*case))]
    assert not wrong, "\n".join(wrong)


def _without_keys(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in PLACEMENT_KEYS}


def test_a_config_without_placement_keys_means_the_defaults_of_its_family(families: dict[str, Any]) -> None:
    for name, config in families.items():
        raw = _without_keys(config)
        if name in FAMILIES:
            default, gone = RoutingSpec.from_hf_config(config), config.to_dict().keys() - raw.keys()
            assert RoutingSpec.from_hf_config(raw) == default, f"{name}: without {gone}"
        elif name not in REFUSED and "text_config" not in raw and "thinker_config" not in raw:
            with pytest.raises(ConfigError, match=r"keys seen: .*expert"):
                RoutingSpec.from_hf_config(raw)


def test_the_built_in_table_has_the_numbers_of_transformers_defaults(families: dict[str, Any]) -> None:
    for name, family in SAME_AS_DEFAULTS.items():
        assert model_named(name).spec == RoutingSpec.from_hf_config(families[family]), name


def test_families_that_one_layer_axis_cannot_hold_are_refused_by_name(families: dict[str, Any]) -> None:
    for name, word in REFUSED.items():
        with pytest.raises(ConfigError, match=f"{name}.*{word}|{word}"):
            RoutingSpec.from_hf_config(families[name])


def _difference(name: str, config: Any, given: Any) -> str | None:
    try:
        truth, read = built(config), RoutingSpec.from_hf_config(given)
    except Exception as error:  # one family that fails hides none of the others
        return f"{name}: {type(error).__name__}: {error}"
    return None if truth == read else f"{name}: built {truth}, read {read}"


def _short(name: str, config: Any, **changes: Any) -> Any:
    return type(config)(**{"num_hidden_layers": LAYERS, **NEEDS.get(name, {}), **changes})


def _variants(name: str, config: Any) -> Iterator[Any]:
    dense, sparse = _WORDS.get(name, ("dense", "sparse"))
    words = [sparse if moe else dense for moe in _MOE_OF_8]
    for key in config.to_dict().keys() & (VARIANTS.keys() | {"mlp_layer_types", "layers_block_type"}):
        if name not in REFUSED:
            yield _short(name, config, **{key: VARIANTS.get(key, words)})
