"""Recordings from and to other files: plain .npz arrays, and rollouts that slime or miles saved for debugging.

one .npz per step: `sample` (text), `tokens` (lengths), `token_ids` (all, one after another; may be missing),
`ids` [all rows, L, K], `valid` [all rows] bool, `version` and `kind` [all rows], `spec` and `layout` (JSON text), `step`

A debug dump (`--save-debug-rollout-data`) was read against slime 624b824a (`observability/rollout_data_utils`,
`Sample.to_dict`) and miles 31f1ca96 (`ray/rollout/debug_data`): {"rollout_id": step, "samples": [{"tokens",
"rollout_routed_experts" [tokens - 1, decoder layers, top-k], "weight_versions", "rollout_log_probs" of the response, ...}]}.
It does not say who decoded or prefilled a row, nor which turn had which weights.

Nothing is unpickled: the opcodes of what `torch.save` wrote are read one by one, and no name in them is looked up or called.
What is no number, text, list, dict or array becomes `Foreign`, with its name.
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
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
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind, check_shape, hash_tokens

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


_STORAGES = {
    "Byte": "u1", "Char": "i1", "Short": "<i2", "Int": "<i4", "Long": "<i8", "Half": "<f2", "Float": "<f4",
    "Double": "<f8", "Bool": "?",
}  # fmt: skip
"""`torch ByteStorage` and so on -> numpy's type."""
_NUMBERS = "?iuf"
"""Kinds of numpy's dtypes that are read."""


@dataclass(frozen=True)
class Foreign:
    """An object that stays unread."""

    name: str


@dataclass
class _Array:
    """A numpy array whose bytes come in the next BUILD."""

    value: Any = None


def read_saved(path: Path) -> Any:
    """Raises RecordingInvalid for what is no file of `torch.save`, or cut or damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            root = pickled.removesuffix("data.pkl")
            return _plain(_Machine(lambda key: archive.read(f"{root}data/{key}")).run(archive.read(pickled)))
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
    ) as error:
        raise RecordingInvalid(f"{path}: expected a file that torch.save wrote: {error!r}") from error


class _Machine:
    """The pickle's own stack, of values."""

    def __init__(self, storage: Callable[[str], bytes]) -> None:
        self._storage, self._memo = storage, dict[int, Any]()
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self._stack.pop()
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _ARGUMENTS:
                self._stack.append(argument)
            elif name not in ("PROTO", "FRAME"):
                # An unknown one is an AttributeError: damaged, or another protocol.
                getattr(self, f"_{name.lower()}")(argument)
        raise ValueError("the pickle has no end")

    def _global(self, name: str) -> None:
        self._stack.append(Foreign(name))

    def _mark(self, _: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _put(self, at: int) -> None:
        self._memo[at] = self._stack[-1]

    def _get(self, at: int) -> None:
        self._stack.append(self._memo[at])

    _binput = _long_binput = _put
    _binget = _long_binget = _get

    def _tuple(self, _: Any) -> None:
        values = tuple(self._marked())
        self._stack.append(values)

    def _last(self, _: Any, *, count: int) -> None:
        self._stack[-count:] = [tuple(self._stack[-count:])]

    _tuple1 = partialmethod(_last, count=1)
    _tuple2 = partialmethod(_last, count=2)
    _tuple3 = partialmethod(_last, count=3)

    def _append(self, _: Any) -> None:
        value = self._stack.pop()
        self._stack[-1].append(value)

    def _appends(self, _: Any) -> None:
        values = self._marked()
        self._stack[-1].extend(values)

    def _setitem(self, _: Any) -> None:
        key, value = self._stack[-2:]
        del self._stack[-2:]
        self._set(key, value)

    def _setitems(self, _: Any) -> None:
        values = self._marked()
        for key, value in zip(values[::2], values[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        if isinstance(self._stack[-1], dict):
            self._stack[-1][key] = value

    def _binpersid(self, _: Any) -> None:
        _, kind, key, _, count = self._stack.pop()
        found = np.frombuffer(self._storage(key), _STORAGES[kind.name[6:-7]])
        if len(found) != count:
            raise ValueError(f"storage {key} has {len(found)} numbers, expected {count}")
        self._stack.append(found)

    def _reduce(self, _: Any) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        self._stack.append(_made(called.name if isinstance(called, Foreign) else "", arguments))

    _newobj = _reduce

    def _build(self, _: Any) -> None:
        state, built = self._stack.pop(), self._stack[-1]
        if isinstance(built, np.dtype) and state[1] == ">":
            raise ValueError("an array of big-endian numbers")
        if isinstance(built, _Array):
            _, shape, dtype, fortran, data = state
            flat = np.frombuffer(data, dtype)
            built.value = flat.reshape(shape, order="F" if fortran else "C")


def _made(name: str, arguments: tuple[Any, ...]) -> Any:
    """What calling that name would give, of the few that arrays are made with."""
    if name == "torch._utils _rebuild_tensor_v2":
        return _tensor(*arguments[:4])
    if name == "collections OrderedDict":
        return {}
    if name.endswith("multiarray _reconstruct"):
        return _Array()
    if name == "numpy dtype":
        dtype = np.dtype(str(arguments[0]))
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"an array of {dtype}")
        return dtype
    if name == "_codecs encode":
        return arguments[0].encode("latin1")
    return Foreign(name)


def _tensor(storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    count = int(np.prod(shape, dtype=np.int64))
    plain = tuple(int(np.prod(shape[at + 1 :], dtype=np.int64)) for at in range(len(shape)))
    if count and any(size > 1 and a != b for size, a, b in zip(shape, stride, plain, strict=True)):
        raise ValueError(f"a tensor of strides {stride} for shape {shape}; expected a contiguous one")
    if not 0 <= offset <= offset + count <= len(storage):
        raise ValueError(f"a tensor of {count} numbers at {offset} of {len(storage)}")
    return storage[offset : offset + count].reshape(shape)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    return value.value if isinstance(value, _Array) else value


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_ARGUMENTS = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINBYTES",
        "SHORT_BINBYTES",
    ]
)


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
    """A sample's arrays as `import_npz` reads them."""
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
