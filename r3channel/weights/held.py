"""What the engines hold since a commit, as a file: every tensor that was sent, and every parameter that an engine has.

JSON, so that another process, another day, can hold a running engine against it: `r3channel weights verify`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3channel.errors import ManifestMismatch
from r3channel.weights.buckets import Manifest

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """One committed version."""

    version: int
    manifest_digest: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(Hugging Face name, dtype, shape) of each tensor sent, in order."""
    engine: Mapping[str, Sequence[Mapping[str, str]]]
    """By an engine's number of ranks, then by rank: its own parameter name -> checksum, 16 hex digits of SHA-256 (digests.py);
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
