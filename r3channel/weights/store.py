"""Files of weights: checkpoints, and what engines hold. This module does not know engines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from r3channel.errors import ConfigError, ManifestMismatch
from r3channel.weights.manifest import unit_of


def checkpoint_tensors(folder: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a checkpoint folder.

    One tensor is read from disk at a time. Tensors that an engine fuses follow one another, also if they lie in different files.

    Args:
        folder: A folder of safetensors files.

    Yields:
        (name, tensor), on the CPU, in the folder's dtypes.

    Raises:
        ConfigError: The folder has no safetensors files, a file is not one, or a name is in two files.
    """
    place = _open(folder)
    for name in sorted(place, key=lambda name: (unit_of(name), name)):
        yield name, place[name].get_tensor(name)


def checkpoint_names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of all tensors of the folder.

    Raises:
        ConfigError: As in `checkpoint_tensors`.
    """
    return list(_open(folder))


def dtype_of(folder: str | os.PathLike[str], name: str) -> str:
    """Return a tensor's dtype as safetensors writes it ("F32", "BF16").

    Raises:
        ConfigError: As in `checkpoint_tensors`.
    """
    return _open(folder)[name].get_slice(name).get_dtype()


def _open(folder: str | os.PathLike[str]) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    place: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            file: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: {error}; is it a safetensors file, and whole?") from error
        if twice := sorted(place.keys() & set(file.keys())):
            raise ConfigError(f"{path}: tensor {twice[0]} lies in another file of the folder too")
        place |= dict.fromkeys(file.keys(), file)
    if not place:
        raise ConfigError(f"{os.fspath(folder)} holds no .safetensors file with a tensor")
    return place


_FORMAT = 3


class HeldWeights(NamedTuple):
    """One committed version."""

    version: int
    engine: Mapping[str, Sequence[Mapping[str, str]]]
    """By an engine's number of ranks, then by rank: the engine's own parameter name -> checksum, 16 hex digits of SHA-256
    (checksums.py). Fused parameters are included."""

    def of_ranks(self, ranks: int) -> Sequence[Mapping[str, str]]:
        """Return the checksums of an engine with so many ranks, by rank.

        Raises:
            ManifestMismatch: No such engine took part.
        """
        if str(ranks) not in self.engine:
            raise ManifestMismatch(f"the file tells of {', '.join(self.engine)} ranks, not of {ranks}")
        return self.engine[str(ranks)]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the weights and replace the file whole.

        A reader sees the old version or the new one.
        """
        new = Path(f"{os.fspath(path)}.new")
        new.write_text(json.dumps({"r3channel_weights": _FORMAT, **self._asdict()}, indent=0) + "\n")
        new.replace(path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> HeldWeights:
        """Read a file written by `write`.

        Raises:
            ManifestMismatch: The file is not one written by `write`.
        """
        try:
            values: dict[str, Any] = json.loads(Path(path).read_bytes())
            if values["r3channel_weights"] != _FORMAT:
                raise ValueError(f"format {values['r3channel_weights']!r}, expected {_FORMAT}")
            engine = {ranks: [dict(sums) for sums in held] for ranks, held in values["engine"].items()}
            return cls(int(values["version"]), engine)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ManifestMismatch(f"{path} is no manifest of committed weights: {error!r}") from error
