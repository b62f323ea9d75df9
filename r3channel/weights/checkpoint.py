"""A Hugging Face checkpoint on disk: its names and shapes from the headers, its tensors one after another. No engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch

from r3channel.errors import ConfigError
from r3channel.weights.buckets import unit_of

_MAX_HEADER_BYTES = 256 << 20


def checkpoint_shapes(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors of a Hugging Face folder, from the headers of its safetensors files; no data is read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(folder):
        with path.open("rb") as file:
            header = _header(file, path)
        shapes |= {name: tuple(row["shape"]) for name, row in header.items() if name != "__metadata__"}
    return shapes


def checkpoint_tensors(folder: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) of all tensors of the folder, in its dtypes; one is read from disk at a time.

    Tensors that an engine fuses follow one another, also when they lie in different files. Raises ConfigError for a
    folder without safetensors files, a file that is none, and a name in two files.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as opened:
        place: dict[str, Any] = {}
        for path in _files(folder):
            try:
                file: Any = opened.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: {error}; is it a safetensors file, and whole?") from error
            twice = sorted(place.keys() & set(file.keys()))
            if twice:
                raise ConfigError(f"{path}: tensor {twice[0]} lies in another file of the folder too")
            place |= dict.fromkeys(file.keys(), file)
        for name in sorted(place, key=lambda name: (unit_of(name)[0], name)):
            yield name, place[name].get_tensor(name)


def _files(folder: str | os.PathLike[str]) -> list[Path]:
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{os.fspath(folder)} holds no .safetensors file")
    return files


def _header(file: BinaryIO, path: Path) -> dict[str, dict[str, list[int]]]:
    size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ConfigError(f"{path}: header of {size} bytes; is it a safetensors file?")
    try:
        return json.loads(file.read(size))
    except ValueError as error:
        raise ConfigError(f"{path}: its header is no JSON; is it a safetensors file?") from error
