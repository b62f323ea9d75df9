"""The routing spec: from Megatron's config, its sizes and refusals. From a Hugging Face config: `test_hf_config`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec


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
