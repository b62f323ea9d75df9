"""The shape of one model's routing. Nothing here knows about samples, files or processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import xxhash

from r3channel.errors import ConfigError
from r3channel.model import hf_config

_MAX_INT16_EXPERTS = 32767  # ids travel as int16 above 256 experts: torch and gloo lack uint16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """Layers, experts and top-k: all that is needed to size and check a row.

    >>> spec = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)
    >>> spec.id_dtype, spec.bytes_per_token
    (dtype('uint8'), 24)
    """

    num_layers: int
    """Decoder layers, dense ones included; MTP layers are not counted."""
    moe_layers: tuple[int, ...]
    """Global 0-based decoder layers that have a router, ascending. The position in this tuple is the moe_index."""
    num_experts: int
    """Routed (logical) experts, shared ones not counted."""
    top_k: int
    id_dtype: np.dtype[Any] = field(init=False, repr=False, compare=False)
    """uint8 up to 256 experts, else int16."""
    num_moe_layers: int = field(init=False, repr=False, compare=False)
    bytes_per_token: int = field(init=False, repr=False, compare=False)
    """Bytes of one decoded row over all MoE layers."""
    digest: int = field(init=False, repr=False, compare=False)
    """64-bit identity of the spec: xxh3 of its canonical JSON."""

    def __post_init__(self) -> None:
        layers = self.moe_layers
        if not layers or list(layers) != sorted(set(layers)):
            raise ConfigError(f"moe_layers {layers}: expected at least one layer, ascending and distinct")
        if layers[0] < 0 or layers[-1] >= self.num_layers:
            raise ConfigError(f"moe_layers {layers[0]}..{layers[-1]} lie outside 0..{self.num_layers - 1}")
        if not 1 <= self.top_k <= self.num_experts <= _MAX_INT16_EXPERTS:
            raise ConfigError(
                f"top_k {self.top_k} of {self.num_experts} experts: expected 1 <= top_k <= experts <= {_MAX_INT16_EXPERTS}"
            )
        dtype = np.dtype(np.uint8 if self.num_experts <= 256 else np.int16)
        object.__setattr__(self, "id_dtype", dtype)  # on the path of every frame: fields, not properties
        object.__setattr__(self, "num_moe_layers", len(layers))
        object.__setattr__(self, "bytes_per_token", len(layers) * self.top_k * dtype.itemsize)
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        object.__setattr__(self, "digest", xxhash.xxh3_64_intdigest(text.encode()))

    def moe_index(self, layer: int) -> int:
        """Return the position of a global decoder layer on the MoE axis.

        Raises:
            ConfigError: the layer is dense or absent.
        """
        if layer not in self.moe_layers:
            raise ConfigError(f"decoder layer {layer} is dense or absent; MoE layers are {self.moe_layers}")
        return self.moe_layers.index(layer)

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_layers": self.num_layers,
            "moe_layers": list(self.moe_layers),
            "num_experts": self.num_experts,
            "top_k": self.top_k,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoutingSpec:
        return cls(
            num_layers=int(values["num_layers"]),
            moe_layers=tuple(int(layer) for layer in values["moe_layers"]),
            num_experts=int(values["num_experts"]),
            top_k=int(values["top_k"]),
        )

    @classmethod
    def from_hf_config(cls, config: Any) -> RoutingSpec:
        """Read the spec from a Hugging Face configuration.

        Args:
            config: a checkpoint folder, the mapping in its `config.json`, or transformers' object of it (anything with
                `to_dict`).

        Raises:
            ConfigError: the convention is not known (see `hf_config`); the text has the keys that were seen.
        """
        return cls(**hf_config.read(config))

    @classmethod
    def from_megatron(cls, config: Any) -> RoutingSpec:
        """Read the spec from a Megatron-core `TransformerConfig`.

        It is read by attribute; nothing is imported.

        Raises:
            ConfigError: the config has no experts, or its layer pattern does not fit its layers.
        """
        if not config.num_moe_experts:
            raise ConfigError("the Megatron config has no num_moe_experts; is this an MoE model?")
        pattern, layers = config.moe_layer_freq, range(config.num_layers)
        if isinstance(pattern, int):  # Megatron-core 0.16.1
            pattern = [layer % pattern == 0 for layer in layers]
        if len(pattern) != len(layers):
            raise ConfigError(f"moe_layer_freq has {len(pattern)} entries for {len(layers)} layers")
        return cls(
            num_layers=config.num_layers,
            moe_layers=tuple(compress(layers, pattern)),
            num_experts=config.num_moe_experts,
            top_k=config.moe_router_topk,
        )
