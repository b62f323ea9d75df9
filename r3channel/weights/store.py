"""The last committed weights, packed, in the trainer's host memory: what one engine is repaired from, alone.

Twice the model's bytes at most: what was committed, and the room into which the next version is packed. Nothing here
knows an engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from r3channel.errors import ConfigError, ManifestMismatch, UsageError, WeightsDiffer
from r3channel.weights.manifest import Bucket, Manifest, new_buffer, unit_of

_HOST = torch.device("cpu")


def payload_digest(payload: torch.Tensor) -> int:
    """xxh3 of a flat uint8 tensor on the CPU: 64 bits, some 10 GB/s."""
    return xxhash.xxh3_64_intdigest(payload.numpy().data)


class Buffers:
    """The memory that updates are packed into: a copy of the coming version beside the committed one (`keep`), or two buffers in
    turn, of which one leaves while the other is packed. One thread."""

    def __init__(self, *, keep: bool, device: torch.device = _HOST) -> None:
        """A copy is kept on the host."""
        self.keep, self._device = keep, _HOST if keep else device
        self.version: int | None = None
        self.manifest: Manifest | None = None
        self.digests: tuple[int, ...] = ()
        self._committed: list[torch.Tensor] = []
        self._coming: list[torch.Tensor] = []

    def take(self, index: int, payload_bytes: int) -> torch.Tensor:
        """Flat uint8 room for bucket `index`, at least that long. `take(index + 2)` gives it again, or with `keep` the second
        update after this."""
        at = index if self.keep else index % 2
        if at < len(self._coming):
            held = len(self._coming[at])
            if held == payload_bytes or (held > payload_bytes and not self.keep):
                return self._coming[at]
        del self._coming[at:]
        self._coming.append(new_buffer(payload_bytes, self._device))
        return self._coming[-1]

    def commit(self, version: int, manifest: Manifest, digests: tuple[int, ...]) -> None:
        """What was taken since the last commit is now the committed version."""
        self._committed, self._coming = self._coming, self._committed
        self.version, self.manifest, self.digests = version, manifest, digests

    def coming(self) -> list[torch.Tensor]:
        """The buckets of the coming version as far as they are packed."""
        return self._coming

    def read(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Every committed bucket with its bytes, in order.

        WeightsDiffer if bytes changed since they were packed; UsageError without a committed version.
        """
        if self.manifest is None:
            raise UsageError("nothing was committed yet, so there is no copy to repair an engine from")
        for index, (bucket, digest) in enumerate(zip(self.manifest.buckets, self.digests, strict=True)):
            payload = self._committed[index]
            if payload_digest(payload) != digest:
                raise WeightsDiffer(
                    f"bucket {index} ({bucket}) of the host copy of version {self.version} changed since it was packed; "
                    "send a whole update instead"
                )
            yield bucket, payload


def checkpoint_tensors(folder: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) of all tensors of the folder, in its dtypes; one is read from disk at a time.

    Tensors that an engine fuses follow one another, also when they lie in different files. Raises ConfigError for a
    folder without safetensors files, a file that is none, and a name in two files.
    """
    with _opened(folder) as place:
        for name in sorted(place, key=lambda name: (unit_of(name)[0], name)):
            yield name, place[name].get_tensor(name)


def checkpoint_names(folder: str | os.PathLike[str]) -> list[str]:
    """The names of all tensors of the folder; raises as `checkpoint_tensors`."""
    with _opened(folder) as place:
        return list(place)


@contextmanager
def _opened(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The file of each tensor."""
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
        yield place


def _files(folder: str | os.PathLike[str]) -> list[Path]:
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{os.fspath(folder)} holds no .safetensors file")
    return files


_FORMAT = 2


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """One committed version."""

    version: int
    manifest_digest: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(Hugging Face name, dtype, shape) of each tensor sent, in order."""
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

    @classmethod
    def of(
        cls, manifest: Manifest, *, version: int, engine: Mapping[str, Sequence[Mapping[str, str]]]
    ) -> HeldWeights:
        metas = (meta for bucket in manifest.buckets for meta in bucket.tensors)
        tensors = tuple((meta.name, meta.dtype_name, meta.shape) for meta in metas)
        return cls(version, manifest.digest, tensors, dict(engine))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Replace the file whole: a reader sees the old version or the new one."""
        new = Path(f"{os.fspath(path)}.new")
        values = {
            "r3channel_weights": _FORMAT,
            "version": self.version,
            "manifest_digest": f"{self.manifest_digest:016x}",
            "tensors": [{"name": n, "dtype": d, "shape": list(s)} for n, d, s in self.tensors],
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
                int(values["manifest_digest"], 16),
                tuple(
                    (str(t["name"]), str(t["dtype"]), tuple(map(int, t["shape"]))) for t in values["tensors"]
                ),
                {
                    str(ranks): [{str(n): str(c) for n, c in sums.items()} for sums in held]
                    for ranks, held in values["engine"].items()
                },
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ManifestMismatch(
                f"{os.fspath(path)} is no manifest of committed weights: {error!r}"
            ) from error
