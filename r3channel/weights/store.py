"""The last committed weights in the trainer's host memory, to repair one engine from; checkpoints; the file of what is held.

A copy is twice the bytes that this rank gave: what was committed, and room for the next version. Nothing here knows an engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from r3channel.errors import ConfigError, ManifestMismatch, WeightsCorrupt
from r3channel.weights.checksums import tensor_digest
from r3channel.weights.manifest import unit_of
from r3channel.weights.stages import Given


class HostCopy:
    """What a trainer rank gave: the committed version, and the memory into which the next one is copied. One thread."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.given = Given((), (), None)
        """What was given for the committed version."""
        self.coming: list[torch.Tensor] = []
        self._committed: list[torch.Tensor] = []
        self._digests: list[str] = []

    def put(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Copy tensor number `index` of the coming version into the other half of the memory; numbers rise."""
        if index < len(self.coming):
            held = self.coming[index]
            if (held.dtype, held.shape) == (tensor.dtype, tensor.shape):
                return held.copy_(tensor.detach())
        del self.coming[index:]
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.coming.append(copy)
        return copy

    def commit(self, version: int, given: Given) -> None:
        """Make what was put since the last commit the committed version."""
        del self.coming[len(given.held) :]
        self._committed, self.coming = self.coming, self._committed
        self._digests = [tensor_digest(tensor) for tensor in self._committed]
        self.version, self.given = version, given

    def read(self) -> Iterator[list[torch.Tensor]]:
        """The committed tensors by bucket. WeightsCorrupt, naming one, if its bytes changed since they were committed."""
        for index, (meta, _) in enumerate(self.given.held):
            if tensor_digest(self._committed[index]) != self._digests[index]:
                raise WeightsCorrupt(
                    f"tensor {meta} of the host copy of version {self.version} changed since it was committed; send a whole "
                    "update instead"
                )
        yield from by_bucket(self._committed, self.given.ends)


def by_bucket(tensors: Sequence[torch.Tensor], ends: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """The tensors, cut into buckets at each end."""
    for start, end in pairwise((0, *ends)):
        yield list(tensors[start:end])


def checkpoint_tensors(folder: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) of all tensors of the folder, in its dtypes; one is read from disk at a time.

    Tensors that an engine fuses follow one another, also when they lie in different files. Raises ConfigError for a
    folder without safetensors files, a file that is none, and a name in two files.
    """
    with _opened(folder) as place:
        for name in sorted(place, key=lambda name: (unit_of(name), name)):
            yield name, place[name].get_tensor(name)


def checkpoint_names(folder: str | os.PathLike[str]) -> list[str]:
    """The names of all tensors of the folder; raises as `checkpoint_tensors`."""
    with _opened(folder) as place:
        return list(place)


@contextmanager
def _opened(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Tensor name -> its opened file."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as opened:
        place: dict[str, Any] = {}
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{os.fspath(folder)} holds no .safetensors file")
        for path in files:
            try:
                file: Any = opened.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: {error}; is it a safetensors file, and whole?") from error
            twice = sorted(place.keys() & set(file.keys()))
            if twice:
                raise ConfigError(f"{path}: tensor {twice[0]} lies in another file of the folder too")
            place |= dict.fromkeys(file.keys(), file)
        yield place


_FORMAT = 3


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """One committed version."""

    version: int
    engine: Mapping[str, Sequence[Mapping[str, str]]]
    """By an engine's number of ranks, then by rank: its own parameter name -> checksum, 16 hex digits of SHA-256 (checksums.py);
    fused parameters included."""

    def of_ranks(self, ranks: int) -> Sequence[Mapping[str, str]]:
        """By rank, of an engine with so many; ManifestMismatch where no such one took part."""
        if str(ranks) not in self.engine:
            raise ManifestMismatch(
                f"the file tells of engines with {', '.join(self.engine)} ranks, this one has {ranks}"
            )
        return self.engine[str(ranks)]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Replace the file whole: a reader sees the old version or the new one."""
        new = Path(f"{os.fspath(path)}.new")
        values = {
            "r3channel_weights": _FORMAT,
            "version": self.version,
            "engine": {ranks: [dict(sums) for sums in held] for ranks, held in self.engine.items()},
        }
        new.write_text(json.dumps(values, indent=0) + "\n")
        new.replace(path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> HeldWeights:
        """ManifestMismatch for anything but such a file."""
        try:
            values: dict[str, Any] = json.loads(Path(path).read_bytes())
            if values["r3channel_weights"] != _FORMAT:
                raise ValueError(f"format {values['r3channel_weights']!r}, expected {_FORMAT}")
            return cls(
                int(values["version"]),
                {
                    str(ranks): [{str(n): str(c) for n, c in sums.items()} for sums in held]
                    for ranks, held in values["engine"].items()
                },
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ManifestMismatch(
                f"{os.fspath(path)} is no manifest of committed weights: {error!r}"
            ) from error
