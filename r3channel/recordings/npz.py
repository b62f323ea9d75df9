"""A step as plain arrays, out of a recording and back into one. Nothing is unpickled.

one .npz per step: `sample` (text), `tokens` (lengths), `token_ids` (all, one after another; may be missing),
`ids` [all rows, L, K], `valid` [all rows] bool, `version` and `kind` [all rows], `spec` and `layout` (JSON text), `step`
"""

from __future__ import annotations

import json
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.errors import R3Error, RecordingInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.recordings.diagnose import spread
from r3channel.recordings.recorder import write_step
from r3channel.recordings.recording import Recording
from r3channel.recordings.step import RecordedStep
from r3channel.wire.digest import fold, layer_digests
from r3channel.wire.frame import encode_frame
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind, check_shape
from r3channel.wire.tokens import hash_tokens

_NEEDED = ("sample", "tokens", "ids", "spec", "step")


def export_npz(recording: Recording, folder: Path) -> list[Path]:
    """A file for each step. Raises what reading does."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number in recording.steps:
        step, spec = recording.step(number), recording.manifest.spec
        names = [sample.sample_id for sample in step.samples]
        ids = [step.ids(name) for name in names]
        spans = [spread(sample.provenance, sample.tokens - 1) for sample in step.samples]
        arrays: dict[str, Any] = {
            "sample": np.asarray(names),
            "tokens": np.asarray([sample.tokens for sample in step.samples], np.int64),
            "ids": np.concatenate([ids_TLK for ids_TLK, _ in ids]),
            "valid": np.concatenate([there_T for _, there_T in ids]),
            "version": np.concatenate([version for version, _ in spans]),
            "kind": np.concatenate([kind for _, kind in spans]),
            "spec": np.asarray(json.dumps(spec.to_dict())),
            "layout": np.asarray(json.dumps(recording.manifest.layout.to_dict())),
            "step": np.asarray(number),
        }
        if step.tokens:
            arrays["token_ids"] = np.concatenate([step.tokens[name] for name in names])
        path = folder / f"step-{number:06d}.npz"
        np.savez(path, **arrays)
        written.append(path)
    return written


def import_npz(files: list[Path], folder: Path, *, layout: TrainerLayout | None = None) -> None:
    """Write a recording of these files. Raises RecordingInvalid for a dump that lacks what is needed."""
    for path in files:
        write_arrays(path, _read(path), folder, layout=layout)


def write_arrays(path: Path, arrays: dict[str, Any], folder: Path, *, layout: TrainerLayout | None) -> None:
    """A step of a recording; `path` is where the arrays came from. Raises RecordingInvalid."""
    try:
        step = _step(arrays, layout)
    except (R3Error, ValueError, TypeError, KeyError, IndexError) as error:
        raise RecordingInvalid(f"{path}: the arrays do not fit together: {error}") from error
    write_step(folder, step)


def _read(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RecordingInvalid(f"{path}: expected an .npz of plain arrays: {error}") from error
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        raise RecordingInvalid(
            f"{path} has the arrays {sorted(found)}, needed are {missing} too; `r3channel export` writes such files"
        )
    return found


def _step(arrays: dict[str, Any], layout: TrainerLayout | None) -> RecordedStep:
    spec = RoutingSpec.from_dict(json.loads(str(arrays["spec"])))
    cut = layout or TrainerLayout.from_dict(json.loads(str(arrays["layout"])) if "layout" in arrays else {})
    ids_RLK = np.ascontiguousarray(arrays["ids"])
    check_shape(ids_RLK, spec=spec, where="ids")
    names, lengths = [str(name) for name in arrays["sample"]], [int(count) for count in arrays["tokens"]]
    if sum(lengths) - len(lengths) != len(ids_RLK):
        raise ValueError(
            f"{len(ids_RLK)} rows of ids, expected {sum(lengths) - len(lengths)}: a row per token but the last"
        )
    samples, frames, tokens, at, token_at = {}, dict[str, list[bytes]](), dict[str, Ids](), 0, 0
    for name, length in zip(names, lengths, strict=True):
        own = slice(at, at + length - 1)
        if "token_ids" in arrays:
            tokens[name] = arrays["token_ids"][token_at : token_at + length].astype(np.int32)
        samples[name], frame = _sample(arrays, name, own, tokens.get(name), spec)
        frames[name] = [frame]
        at, token_at = own.stop, token_at + length
    assignment = Assignment.balanced(dict(zip(names, lengths, strict=True)), dp=cut.dp, microbatch_size=1)
    ordered = tuple(samples[name] for name in assignment.sample_ids)
    ticket = Ticket("imported", int(arrays["step"]), spec, cut, assignment, ordered, 1 << 20)
    return RecordedStep(ticket, frames, tokens, spec)


def _sample(
    arrays: dict[str, Any], name: str, own: slice, tokens: Ids | None, spec: RoutingSpec
) -> tuple[TicketSample, bytes]:
    ids_TLK, rows = np.ascontiguousarray(arrays["ids"][own]), own.stop - own.start
    valid_T = arrays["valid"][own].astype(bool) if "valid" in arrays else np.ones(rows, bool)
    version_T = arrays["version"][own] if "version" in arrays else np.zeros(rows, np.int64)
    kind_T = arrays["kind"][own] if "kind" in arrays else np.full(rows, RowKind.UNKNOWN)
    spans = _runs(version_T, kind_T.clip(0))
    digests_L = layer_digests(ids_TLK, first_row=0, valid_T=None if valid_T.all() else valid_T)
    edges = np.flatnonzero(np.diff(np.concatenate([[True], valid_T, [True]]).astype(np.int8))).tolist()
    invalid = tuple(zip(edges[::2], edges[1::2], strict=True))
    tokens_hash = 0 if tokens is None else hash_tokens(tokens)
    sample = TicketSample(name, rows + 1, tokens_hash, fold(digests_L), spans, invalid)
    frame = encode_frame(spec, expert_ids_TLK=ids_TLK, valid_T=valid_T, provenance=spans, codec="stored")
    return sample, frame


def _runs(version_T: Ids, kind_T: Ids) -> tuple[ProvenanceSpan, ...]:
    changes = np.flatnonzero((np.diff(version_T) != 0) | (np.diff(kind_T) != 0)) + 1
    edges = [0, *changes.tolist(), len(version_T)]
    return tuple(
        ProvenanceSpan(start=a, end=b, weight_version=int(version_T[a]), kind=RowKind(int(kind_T[a])))
        for a, b in pairwise(edges)
    )
