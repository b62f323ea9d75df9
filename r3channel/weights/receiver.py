"""The receiving end of buckets inside an engine: which parameter each tensor goes to, and how. No network.

The dictionary of parameters is built once: building it per bucket is what made updates of large models slow in engines
(checkpoint-engine measured about 10 s per update for 10^12 parameters). How a tensor is applied differs per engine kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from r3channel.errors import ConfigError, ManifestMismatch
from r3channel.weights.manifest import Bucket

Apply = Callable[[Mapping[str, torch.Tensor], list[tuple[str, torch.Tensor]]], None]
"""(parameters by name, the tensors of one bucket). The tensors are views of a buffer that is reused on return."""

_appliers: dict[str, Apply] = {}


def register_apply(kind: str, apply: Apply) -> None:
    """Give an engine kind its own way to take tensors in. Raises ConfigError for a kind that has one."""
    if kind in _appliers:
        raise ConfigError(f"engine kind {kind!r} has an apply function already")
    _appliers[kind] = apply


def copy_in(parameters: Mapping[str, torch.Tensor], tensors: list[tuple[str, torch.Tensor]]) -> None:
    """The plain kind: same names and shapes. Raises ManifestMismatch, naming the tensor, before anything is written."""
    for name, tensor in tensors:
        known = parameters.get(name)
        if known is None or known.shape != tensor.shape:
            shape = "no such parameter" if known is None else f"shape {list(known.shape)}"
            raise ManifestMismatch(f"tensor {name} {list(tensor.shape)}: the engine has {shape}")
    for name, tensor in tensors:
        parameters[name].detach().copy_(tensor)


register_apply("plain", copy_in)


class BucketReceiver:
    """Takes buckets into an engine's parameters. Fits `BroadcastPipeline.run(apply=)`."""

    def __init__(
        self, named_parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]], *, kind: str = "plain"
    ) -> None:
        """`named_parameters` is called once. Raises ConfigError for an engine kind that nobody registered."""
        if kind not in _appliers:
            raise ConfigError(f"engine kind {kind!r}: expected one of {sorted(_appliers)}")
        self._apply = _appliers[kind]
        self._parameters = dict(named_parameters())

    def __call__(self, index: int, bucket: Bucket, data_N: torch.Tensor) -> None:
        """Apply one bucket; the bytes may be reused on return."""
        self._apply(self._parameters, list(zip(bucket.names, bucket.views(data_N), strict=True)))
