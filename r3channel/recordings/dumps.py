"""Rollouts that slime or miles saved for debugging (`--save-debug-rollout-data`), as a recording. Nothing is unpickled (`saved`).

Read against slime 624b824a (`observability/rollout_data_utils`, `Sample.to_dict`) and miles 31f1ca96 (`ray/rollout/debug_data`):
{"rollout_id": step, "samples": [{"tokens", "rollout_routed_experts" [tokens - 1, decoder layers, top-k], "weight_versions",
"rollout_log_probs" of the response, ...}]}. Who decoded or prefilled a row they do not say, nor which turn had which weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.errors import RecordingInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.npz import write_arrays
from r3channel.recordings.saved import read_saved
from r3channel.wire.routing import RowKind

DUMPS = ("slime-debug", "miles-dump")
_ROWS = "rollout_routed_experts"


def import_dumps(
    files: list[Path], folder: Path, *, spec: RoutingSpec | None, layout: TrainerLayout | None = None
) -> None:
    """Write a recording of these files. Raises RecordingInvalid for a dump that lacks what is needed."""
    if spec is None:
        raise RecordingInvalid(
            "a dump does not say which layers have experts, nor how many; give --model, the folder of the checkpoint"
        )
    for path in files:
        saved = read_saved(path)
        if not isinstance(saved, dict) or not isinstance(saved.get("samples"), list) or not saved["samples"]:
            raise RecordingInvalid(
                f"{path}: expected a dict with 'rollout_id' and 'samples', as --save-debug-rollout-data writes"
            )
        write_arrays(path, _arrays(path, saved, spec), folder, layout=layout)


def _arrays(path: Path, saved: dict[str, Any], spec: RoutingSpec) -> dict[str, Any]:
    """A sample's arrays in the form of `npz`."""
    samples = saved["samples"]
    ids = [_rows(f"{path}: sample {number}", sample, spec) for number, sample in enumerate(samples)]
    return {
        "sample": np.asarray([f"sample{number}" for number in range(len(samples))]),
        "tokens": np.asarray([len(sample["tokens"]) for sample in samples]),
        "token_ids": np.concatenate([np.asarray(sample["tokens"], np.int64) for sample in samples]),
        "ids": np.concatenate(ids),
        "version": np.concatenate(
            [np.full(len(own), _version(sample)) for own, sample in zip(ids, samples, strict=True)]
        ),
        "kind": np.full(sum(map(len, ids)), int(RowKind.UNKNOWN)),
        "spec": np.asarray(json.dumps(spec.to_dict())),
        "step": np.asarray(int(saved["rollout_id"])),
    }


def _rows(where: str, sample: dict[str, Any], spec: RoutingSpec) -> Any:
    """[tokens - 1, MoE layers, K] of the spec's id type."""
    found, tokens = sample.get(_ROWS), sample.get("tokens")
    if not isinstance(found, np.ndarray) or not isinstance(tokens, list):
        raise RecordingInvalid(
            f"{where} has no tensor {_ROWS} or no tokens; was the rollout made with --use-rollout-routing-replay?"
        )
    expected = (len(tokens) - 1, spec.num_layers, spec.top_k)
    if found.shape != expected:
        raise RecordingInvalid(
            f"{where}: {_ROWS} {found.shape}, expected {expected}: a row per token but the last, all decoder layers; is --model "
            "the rollout's?"
        )
    rows = found[:, list(spec.moe_layers)]
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < spec.num_experts:
        raise RecordingInvalid(
            f"{where}: ids {int(rows.min())}..{int(rows.max())}, expected 0..{spec.num_experts - 1}; is --model the rollout's?"
        )
    return rows.astype(spec.id_dtype)


def _version(sample: dict[str, Any]) -> int:
    """The version of all rows, where all turns had the same weights; else -1: the dump does not tell it row by row."""
    versions = {str(version) for version in sample.get("weight_versions") or ()}
    only = versions.pop() if len(versions) == 1 else ""
    return int(only) if only.isdecimal() else -1
