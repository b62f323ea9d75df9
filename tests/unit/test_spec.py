"""The routing spec: from a Hugging Face config, from Megatron's config, its sizes and refusals."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from r3channel.errors import ConfigError
from r3channel.spec import RoutingSpec


def test_qwen3_config_gives_moe_layers_without_the_dense_ones() -> None:
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    }
    spec = RoutingSpec.from_hf_config(config)
    assert spec.moe_layers == (1, 2, 3) and spec.num_experts == 128 and spec.top_k == 8


def test_deepseek_v3_has_58_moe_layers_of_61() -> None:
    config = {
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_layer_freq": 1,
    }
    spec = RoutingSpec.from_hf_config(config)
    assert spec.num_moe_layers == 58 and spec.moe_layers[0] == 3 and spec.bytes_per_token == 464


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.int16), (512, np.int16)])
def test_ids_are_one_byte_up_to_256_experts(experts: int, dtype: type) -> None:
    spec = RoutingSpec(num_layers=1, moe_layers=(0,), num_experts=experts, top_k=1)
    assert spec.id_dtype == np.dtype(dtype)


def test_megatron_frequency_as_number_and_as_list_give_the_same_layers() -> None:
    common = {"num_layers": 4, "num_moe_experts": 8, "moe_router_topk": 2}
    by_list = RoutingSpec.from_megatron(SimpleNamespace(moe_layer_freq=[1, 0, 1, 0], **common))
    by_number = RoutingSpec.from_megatron(SimpleNamespace(moe_layer_freq=2, **common))
    assert by_list == by_number and by_list.moe_layers == (0, 2)


def test_digest_differs_with_any_field_and_survives_a_round_trip() -> None:
    spec = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)
    others = [
        RoutingSpec(num_layers=5, moe_layers=(1, 2, 3), num_experts=128, top_k=8),
        RoutingSpec(num_layers=4, moe_layers=(0, 2, 3), num_experts=128, top_k=8),
        RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=64, top_k=8),
        RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=4),
    ]
    assert len({spec.digest, *(other.digest for other in others)}) == 5
    assert RoutingSpec.from_dict(spec.to_dict()).digest == spec.digest


@pytest.mark.parametrize(
    "changes",
    [{"moe_layers": ()}, {"moe_layers": (2, 1)}, {"moe_layers": (4,)}, {"top_k": 0}, {"top_k": 129}],
)
def test_impossible_spec_is_refused(changes: dict) -> None:
    values = {"num_layers": 4, "moe_layers": (1, 2, 3), "num_experts": 128, "top_k": 8} | changes
    with pytest.raises(ConfigError):
        RoutingSpec(**values)


def test_dense_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="llama"):
        RoutingSpec.from_hf_config({"model_type": "llama", "num_hidden_layers": 2})


def test_a_config_object_is_read_like_its_mapping() -> None:
    values = {"model_type": "x", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    expected = RoutingSpec.from_hf_config(values)
    assert RoutingSpec.from_hf_config(SimpleNamespace(to_dict=lambda: values)) == expected
    inner = SimpleNamespace(to_dict=lambda: values)
    assert RoutingSpec.from_hf_config(SimpleNamespace(to_dict=lambda: {"text_config": inner})) == expected


def test_what_is_no_config_is_refused_by_its_type() -> None:
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        RoutingSpec.from_hf_config(SimpleNamespace(num_experts=8))
