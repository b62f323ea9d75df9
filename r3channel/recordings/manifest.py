"""The head of a recording: one small JSON file, written once, by the first writer. Knows no step.

{"format": "r3channel-recording", "version": 1, "side": "engine" | "router", "spec": {...}, "layout": {...},
 "tokens": true, "versions": {"r3channel": "0.1.0", "numpy": ..., "torch": ..., "sglang": ...}}
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from r3channel.errors import R3Error, RecordingInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout

NAME = "manifest.json"
SIDES = ("engine", "router")
_FORMAT, _VERSION = "r3channel-recording", 1
_NAMED = ("r3channel", "numpy", "torch", "sglang", "megatron-core", "ray", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Spec and layout that every step of the recording shares."""

    spec: RoutingSpec
    layout: TrainerLayout
    side: str = "engine"
    """Who chose or used the ids: the engines, or the trainers' routers."""
    tokens: bool = True
    """Whether token ids were written."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages installed where it was written."""

    def write(self, folder: Path) -> None:
        """Raises RecordingInvalid where another recording lies in the folder, OSError where nothing can be written."""
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".{NAME}-{os.getpid()}-{id(self)}"
        values = {
            "format": _FORMAT, "version": _VERSION, "side": self.side, "spec": self.spec.to_dict(),
            "layout": self.layout.to_dict(), "tokens": self.tokens, "versions": dict(self.versions or installed()),
        }  # fmt: skip
        try:
            scratch.write_text(json.dumps(values, indent=1) + "\n")
            with suppress(FileExistsError):
                os.link(scratch, folder / NAME)  # whole, and never over another relay's
        finally:
            scratch.unlink(missing_ok=True)
        there = Manifest.read(folder)
        for name in ("spec", "layout", "side", "tokens"):
            if getattr(there, name) != getattr(self, name):
                raise RecordingInvalid(
                    f"{folder} holds a recording of {name} {getattr(there, name)}, this one has {getattr(self, name)}; give "
                    "another folder"
                )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises RecordingInvalid."""
        path = folder / NAME
        try:
            values = json.loads(path.read_text())
            header = values["format"], values["version"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecordingInvalid(
                f"{folder}: expected a recording's folder, with its {NAME}: {error!r}. Is it the folder that --record was given?"
            ) from error
        if header != (_FORMAT, _VERSION):
            raise RecordingInvalid(
                f"{path}: format {header[0]!r}, version {header[1]!r}; expected {_FORMAT!r}, {_VERSION}: read it with the "
                "r3channel that wrote it"
            )
        try:
            return cls._of(values)
        except (R3Error, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise RecordingInvalid(f"{path} is damaged: {error!r}") from error

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Manifest:
        if values["side"] not in SIDES:
            raise ValueError(f"side {values['side']!r}, expected one of {SIDES}")
        versions = {str(name): str(version) for name, version in values["versions"].items()}
        spec, layout = RoutingSpec.from_dict(values["spec"]), TrainerLayout.from_dict(values["layout"])
        fields = {"side": values["side"], "tokens": bool(values["tokens"]), "versions": versions}
        return cls(spec=spec, layout=layout, **fields)


def installed() -> dict[str, str]:
    """Name -> version of what is installed here; nothing is imported."""
    versions = {"python": platform.python_version()}
    for name in _NAMED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
