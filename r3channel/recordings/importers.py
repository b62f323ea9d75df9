"""Recordings from and to other files: plain .npz arrays, and rollouts that slime or miles saved for debugging.

An .npz file holds one step: `sample` (text), `tokens` (lengths), `token_ids` (of all samples, one after another, -1 where
they are not known; may be missing), `ids` [all rows, L, K], `valid` [all rows] bool, `version` and `kind` [all rows],
`spec` and `layout` (JSON text), `step`. For the tensors that tokens bring beside their ids it holds `token_tensors`, their
options, and for each of them `NAME.lengths`, entries of [all rows], and `NAME.entries`, row after row; they may be missing.

The format of a debug dump (`--save-debug-rollout-data`) was read in slime 624b824a (`observability/rollout_data_utils`,
`Sample.to_dict`) and miles 31f1ca96 (`ray/rollout/debug_data`): {"rollout_id": step, "samples": [{"tokens",
"rollout_routed_experts" [tokens - 1, decoder layers, top-k], "weight_versions", "rollout_log_probs" of the response, ...}]}.
A dump does not say which engine decoded or prefilled a row, nor which turn had which weights.

Nothing is unpickled: the opcodes that `torch.save` wrote are read one by one, and no name in them is looked up or called.
An object that is no number, text, list, dict or array becomes `Foreign`, with its name.
"""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.errors import RecordingInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.recordings.recorder import segment_name, write_step
from r3channel.recordings.recording import Recording
from r3channel.recordings.step import RecordedStep, spread
from r3channel.wire.digest import fold
from r3channel.wire.frame import encode_frame, parse_frame
from r3channel.wire.routing import Ids, RowKind, check_shape, hash_tokens, spans_of
from r3channel.wire.tensor_frame import TensorRows, encode_tensor
from r3channel.wire.token_tensors import TokenTensor, tensors_of

_MOST_UNPACKED = 100
_DAMAGE = Exception
"""zipfile, zlib, numpy and pickletools do not list what a damaged or hostile archive raises, so every exception is caught."""
_FIELD = r"\('(\w+)', '([|<][biuf]\d+)'(?:, \((\d+),\))?\)"
_DTYPE = rf"'[|<][biufU]\d+'|\[(?:{_FIELD}(?:, )?)+\]"
_HEAD = rf"\x93NUMPY\x01\x00..\{{'descr': ({_DTYPE}), 'fortran_order': (False|True), 'shape': \(([\d, ]*)\), \}} *\n"
_NEEDED = ("sample", "tokens", "ids", "spec", "step")


def export_npz(recording: Recording, folder: Path) -> list[Path]:
    """Write an .npz file for each step.

    Returns:
        The paths of the files.

    Raises:
        RecordingInvalid: a step has samples that are not whole.
        R3Error: a step cannot be read; the errors are those of `Recording.step` and of `RecordedStep`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number in recording.steps:
        step, spec = recording.step(number), recording.manifest.spec
        if step.cut:
            raise RecordingInvalid(
                f"step {number}: {len(step.cut)} of {len(step.ticket.samples)} samples are not whole: {step.cut[:5]}; expected "
                "whole ones, since arrays cannot say what is missing"
            )
        names = [sample.sample_id for sample in step.samples]
        ids, there = zip(*(step.ids(name) for name in names), strict=True)
        version, kind = zip(*(spread(s.provenance, s.tokens - 1) for s in step.samples), strict=True)
        arrays: dict[str, Any] = {
            "sample": names, "tokens": [sample.tokens for sample in step.samples],
            "token_ids": np.concatenate([step.tokens.get(s.sample_id, np.full(s.tokens, -1)) for s in step.samples]),
            "ids": np.concatenate(ids), "valid": np.concatenate(there), "version": np.concatenate(version),
            "kind": np.concatenate(kind), "spec": json.dumps(spec.to_dict()), "step": number,
            "layout": json.dumps(recording.manifest.layout.to_dict()), "token_tensors": step.ticket.token_tensors,
        }  # fmt: skip
        for tensor in step.ticket.tensors:
            whole = [step.tensor_whole(tensor, name) for name in names]
            arrays[f"{tensor.name}.lengths"] = np.concatenate([rows.lengths_T for rows in whole])
            arrays[f"{tensor.name}.entries"] = np.concatenate([rows.entries_N for rows in whole])
        path = folder / f"step-{number:06d}.npz"
        np.savez(path, **arrays)
        written.append(path)
    return written


def import_npz(files: list[Path], folder: Path, *, layout: TrainerLayout | None = None) -> None:
    """Write a recording of these files.

    Args:
        files: .npz files, one for each step.
        folder: the recording's folder.
        layout: the trainer's layout; None: the one in each file.

    Raises:
        RecordingInvalid: a file lacks needed arrays, or is damaged.
    """
    for path in files:
        write_arrays(path, _read(path), folder, layout=layout)


def write_arrays(path: Path, arrays: dict[str, Any], folder: Path, *, layout: TrainerLayout | None) -> None:
    """Write the arrays of one step into a recording.

    Args:
        path: the file that the arrays came from; error texts name it.
        arrays: arrays by name, as the module says.
        folder: the recording's folder.
        layout: the trainer's layout; None: the one in the arrays.

    Raises:
        RecordingInvalid: the arrays do not fit together, or the folder has the step already.
    """
    try:
        step = _step(arrays, layout)
    except _DAMAGE as error:
        raise RecordingInvalid(f"{path}: the arrays do not fit together: {error!r}") from error
    if (folder / segment_name(step.number)).exists():
        raise RecordingInvalid(f"{path}: step {step.number}, which {folder} has already; give another folder")
    write_step(folder, step)


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_sizes(path, archive)
            arrays = {name.removesuffix(".npy"): _array(archive.read(name)) for name in archive.namelist()}
    except _DAMAGE as error:
        raise RecordingInvalid(f"{path}: expected an .npz of plain arrays: {error!r}") from error
    if missing := [name for name in _NEEDED if name not in arrays]:
        problem = f"{path} has the arrays {sorted(arrays)}, needed are {missing} too"
        raise RecordingInvalid(f"{problem}; `r3channel export` writes such files")
    return arrays


def _array(data: bytes) -> Any:
    # numpy's own reader compiles the header, and allocates memory for any shape that the header names.
    begin = 10 + int.from_bytes(data[8:10], "little")
    head = re.fullmatch(_HEAD.encode(), data[:begin], re.DOTALL)
    if head is None:
        raise ValueError(f"a member begins with {data[:100]!r}, expected an array of numbers or text")
    described, *_, fortran, shape = ((text or b"").decode() for text in head.groups())
    fields = [(name, kind, (int(n),) if n else ()) for name, kind, n in re.findall(_FIELD, described)]
    sizes = [int(size) for size in shape.split(",") if size.strip()]
    flat = np.frombuffer(data, fields or described.strip("'"), offset=begin)
    return flat.reshape(sizes, order="F" if fortran == "True" else "C")


def _most_bytes(path: Path) -> int:
    return _MOST_UNPACKED * path.stat().st_size + (1 << 20)


def _check_sizes(path: Path, archive: zipfile.ZipFile) -> None:
    # Arrays of ids do not shrink that much.
    names, total = archive.namelist(), sum(part.file_size for part in archive.infolist())
    if len(set(names)) < len(names) or total > _most_bytes(path):
        most = f"{_MOST_UNPACKED} times as many at most as the file has, each name once"
        raise ValueError(f"{total} bytes in {len(names)} parts; expected {most}")


def _step(arrays: dict[str, Any], layout: TrainerLayout | None) -> RecordedStep:
    spec = RoutingSpec.from_dict(json.loads(str(arrays["spec"])))
    names, lengths = [str(name) for name in arrays["sample"]], [int(count) for count in arrays["tokens"]]
    arrays = {**arrays, "ids": np.ascontiguousarray(arrays["ids"])}
    check_shape(arrays["ids"], spec=spec, where="ids")
    total, rows = sum(lengths), len(arrays["ids"])
    counts = rows, len(arrays.get("token_ids", range(total)))
    if counts != (expected := (total - len(lengths), total)):
        raise ValueError(f"{counts} rows and token ids, expected {expected}: a row per token but the last")
    arrays = {  # what may be missing first
        "token_ids": np.full(total, -1), "valid": np.ones(rows, bool), "version": np.zeros(rows, np.int64),
        "kind": np.full(rows, RowKind.UNKNOWN), "layout": "{}", "token_tensors": (), **arrays,
    }  # fmt: skip
    cut = layout or TrainerLayout.from_dict(json.loads(str(arrays["layout"])))
    if len(set(names)) < len(names) or min(lengths) < 2 or not 0 <= int(arrays["step"]) < 1 << 62:
        text = f"step {arrays['step']}, samples {names[:5]} of {lengths[:5]} tokens"
        raise ValueError(f"{text}; expected each name once, with two tokens at least")
    tensors = tensors_of([str(option) for option in arrays["token_tensors"]], spec)
    whole = [_rows_of(arrays, tensor, rows=rows) for tensor in tensors]
    samples, frames, tokens, at = {}, dict[str, list[bytes]](), dict[str, Ids](), 0
    beside = dict[str, list[bytes]]()
    for index, (name, length) in enumerate(zip(names, lengths, strict=True)):
        own_rows, token_T = slice(at - index, at - index + length - 1), arrays["token_ids"][at : at + length]
        if (token_T >= 0).all():
            tokens[name] = token_T.astype(np.int32)
        samples[name], frame = _sample(arrays, name, own_rows, tokens.get(name), spec)
        frames[name], beside[name] = [frame], [b"".join(encode_tensor(rows.part(own_rows)) for rows in whole)]
        at += length
    assignment = Assignment.balanced(dict(zip(names, lengths, strict=True)), dp=cut.dp, microbatch_size=1)
    ordered = tuple(samples[name] for name in assignment.sample_ids)
    options = tuple(tensor.option for tensor in tensors)
    ticket = Ticket("imported", int(arrays["step"]), spec, cut, assignment, ordered, 1 << 20, options)
    return RecordedStep(ticket, frames, tokens, spec, tensors=beside if options else {})


def _rows_of(arrays: dict[str, Any], tensor: TokenTensor, *, rows: int) -> TensorRows:
    lengths_T, entries_N = arrays[f"{tensor.name}.lengths"], arrays[f"{tensor.name}.entries"]
    seen = lengths_T.shape, entries_N.dtype, len(entries_N)
    if seen != (expected := ((rows,), tensor.entry, int(lengths_T.sum()))):
        raise ValueError(f"{tensor.name}: (rows, type, entries) {seen}, expected {expected}")
    return TensorRows(tensor, 0, lengths_T, entries_N)


def _sample(
    arrays: dict[str, Any], name: str, own_rows: slice, tokens: Ids | None, spec: RoutingSpec
) -> tuple[TicketSample, bytes]:
    parts = ("ids", "valid", "version", "kind")
    ids_TLK, valid_T, version_T, kind_T = (arrays[part][own_rows] for part in parts)
    spans, tokens_hash = spans_of(version_T, kind_T.clip(0)), 0 if tokens is None else hash_tokens(tokens)
    options: dict[str, Any] = {"valid_T": valid_T.astype(bool), "provenance": spans, "codec": "stored"}
    data = encode_frame(spec, expert_ids_TLK=ids_TLK, **options)
    frame = parse_frame(data, spec=spec, sample_id=name)
    invalid = tuple(zip(*[iter(frame.invalid_edges.tolist())] * 2, strict=True))
    return TicketSample(name, len(ids_TLK) + 1, tokens_hash, fold(frame.digests_L), spans, invalid), data


_STORAGES = {
    "Byte": "u1", "Char": "i1", "Short": "<i2", "Int": "<i4", "Long": "<i8", "Half": "<f2", "Float": "<f4",
    "Double": "<f8", "Bool": "?",
}  # fmt: skip
"""Name of a torch storage, without `torch ` and `Storage` -> numpy's type."""
_NUMBERS = "biuf"
"""First letters of the dtypes that are read. numpy would evaluate other words."""
_MOST_AXES = 8


@dataclass(frozen=True)
class Foreign:
    """An object that is not read."""

    name: str


@dataclass
class Array:
    """A numpy array. Its bytes come with the BUILD opcode, after it was made."""

    value: Any = None


def read_saved(path: Path) -> Any:
    """Return the value that `torch.save` saved, numpy's arrays as `Array`.

    The value may be deep, and may hold one list in many places. Callers must neither print it nor walk it.

    Raises:
        RecordingInvalid: the file was not written by `torch.save`, or it is cut or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_sizes(path, archive)
            (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            root = pickled.removesuffix("data.pkl")
            return _run(archive.read(pickled), cache(lambda key: archive.read(f"{root}data/{key}")))
    except _DAMAGE as error:
        raise RecordingInvalid(f"{path}: expected a file that torch.save wrote: {error!r}"[:500]) from error


def _run(data: bytes, storage: Callable[[str], bytes]) -> Any:
    """Return the value that a pickle's opcodes make."""
    stack, marks, memo, taken = list[Any](), list[list[Any]](), dict[Any, Any](), list[Any]()
    encode = cache(partial(str.encode, encoding="latin1"))  # a text that comes again gives the same bytes
    calls = {**_CALLS, "_codecs encode": lambda text, _: encode(_only(str, text))}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if count := _TAKEN.get(name, 0):
            taken = stack[-count:]
            del stack[-count:]
        elif name in _TAKEN:
            taken, stack = stack, marks.pop()
        match name:
            case _ if name in _VALUES:
                stack.append(_VALUES[name](argument))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(taken))
            case "APPEND" | "APPENDS":
                stack[-1].extend(taken)
            case "SETITEM" | "SETITEMS":
                _set_items(stack[-1], taken)
            case "MARK":
                marks.append(stack)
                stack = []
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINPERSID":
                stack.append(_numbers(taken[0], storage))
            case "REDUCE" | "NEWOBJ":
                known = calls.get(_only(Foreign, taken[0]).name)
                stack.append(known(*taken[1][:4]) if known else taken[0])
            case "BUILD":
                _build(stack[-1], taken[0])
            case "STOP":
                return stack.pop()
            case _ if name != "PROTO":
                raise ValueError(f"opcode {name}: damaged, or of another protocol")
    raise ValueError("the pickle has no end")


def _set_items(changed: Any, taken: list[Any]) -> None:
    for key, value in zip(taken[::2], taken[1::2], strict=True):
        if isinstance(changed, dict):
            changed[_only(str | int | None, key)] = value


def _numbers(described: Any, storage: Callable[[str], bytes]) -> Any:
    _, kind, key, _, count = described
    numbers = np.frombuffer(storage(_only(str, key)), _STORAGES[kind.name[6:-7]])
    if len(numbers) != _only(int, count):
        raise ValueError(f"storage {key} has {len(numbers)} numbers, expected {count}")
    return numbers


def _build(built: Any, state: Any) -> None:
    if isinstance(built, np.dtype) and state[1] == ">":
        raise ValueError("an array of big-endian numbers")
    if isinstance(built, Array):
        _, shape, dtype, fortran, data = state
        flat = np.frombuffer(data, _only(np.dtype, dtype))
        built.value = flat.reshape(shape, order="F" if fortran else "C")


def _only(kind: Any, value: Any) -> Any:
    # A pickle may hold one value in many places, so a value may be too large to hash, to print or to make an array of.
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__}, expected {kind}")
    return value


def _dtype(name: Any, *_: Any) -> Any:
    if _only(str, name)[:1] not in _NUMBERS or not name[1:].isdecimal():
        raise ValueError(f"an array of {name:.40}")
    return np.dtype(name)


def _tensor(storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    sizes = (*shape, *stride, offset)
    if len(shape) > _MOST_AXES or not all(0 <= _only(int, size) < 1 << 62 for size in sizes):
        raise ValueError(f"a tensor of {len(shape)} axes, expected {_MOST_AXES} at most, and 62-bit sizes")
    count = prod(shape)
    plain = tuple(prod(shape[at + 1 :]) for at in range(len(shape)))
    if count and any(size > 1 and a != b for size, a, b in zip(shape, stride, plain, strict=True)):
        raise ValueError(f"a tensor of strides {stride} for shape {shape}; expected a contiguous one")
    return storage[offset : offset + count].reshape(shape)  # which raises where numbers are missing


_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils _rebuild_tensor_v2": _tensor, "numpy dtype": _dtype, "collections OrderedDict": lambda *_: {},
    **dict.fromkeys((f"numpy.{core}.multiarray _reconstruct" for core in ("core", "_core")), lambda *_: Array()),
}  # fmt: skip
"""The few names that arrays are made with -> what does their work here, of four arguments at most. Any other stays `Foreign`."""
_VALUES: dict[str, Callable[[Any], Any]] = {
    "NONE": lambda _: None, "NEWTRUE": lambda _: True, "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {}, "EMPTY_LIST": lambda _: [], "EMPTY_TUPLE": lambda _: (), "GLOBAL": Foreign,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE"), lambda value: value),
}  # fmt: skip
"""Opcode of pickle's protocol 2, which `torch.save` writes -> what it puts on the stack, made of its argument."""
_TAKEN = {
    "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "BINPERSID": 1, "REDUCE": 2, "NEWOBJ": 2, "BUILD": 1,
    "TUPLE": 0, "APPENDS": 0, "SETITEMS": 0,
}  # fmt: skip
"""Opcode -> the number of values that it takes off the stack; 0: all since the last mark."""


DUMPS = ("slime-debug", "miles-dump")
_ROWS = "rollout_routed_experts"


def import_dumps(
    files: list[Path], folder: Path, *, spec: RoutingSpec | None, layout: TrainerLayout | None = None
) -> None:
    """Write a recording of debug dumps.

    Args:
        files: dumps of slime or miles, one for each step.
        folder: the recording's folder.
        spec: the routing shape, which a dump does not tell.
        layout: the trainer's layout; None: the default one.

    Raises:
        RecordingInvalid: `spec` is None, or a dump lacks needed fields or is damaged.
    """
    if spec is None:
        raise RecordingInvalid(
            "a dump does not say which layers have experts, nor how many; give --model, the folder of the checkpoint"
        )
    for path in files:
        saved = read_saved(path)
        try:
            arrays = _arrays(saved, spec, most_bytes=_most_bytes(path))
        except _DAMAGE as error:
            raise RecordingInvalid(f"{path}: no rollout that can be read: {error!r}"[:500]) from error
        write_arrays(path, arrays, folder, layout=layout)


def _arrays(saved: Any, spec: RoutingSpec, *, most_bytes: int) -> dict[str, Any]:
    """Return a dump's arrays in the form that `import_npz` reads.

    A pickle may share one list or array many times, so a dump with more ids than `most_bytes` is refused.
    """
    if not isinstance(saved, dict) or not isinstance(saved.get("samples"), list) or not saved["samples"]:
        raise ValueError("expected a dict of 'rollout_id' and 'samples', as --save-debug-rollout-data writes")
    samples = saved["samples"]
    if sum(len(sample["tokens"]) for sample in samples) * spec.num_layers * spec.top_k > most_bytes:
        raise ValueError(f"{len(samples)} samples of more ids than the file holds")
    ids = [_rows(f"sample {number}", sample, spec) for number, sample in enumerate(samples)]
    return {
        "sample": [f"sample{number}" for number in range(len(samples))],
        "tokens": [len(sample["tokens"]) for sample in samples],
        "token_ids": np.concatenate([np.asarray(sample["tokens"], np.int64) for sample in samples]),
        "version": np.concatenate([np.full(len(rows), _version(sample)) for rows, sample in zip(ids, samples, strict=True)]),
        "ids": np.concatenate(ids), "spec": json.dumps(spec.to_dict()), "step": int(saved["rollout_id"]),
    }  # fmt: skip


def _rows(where: str, sample: dict[str, Any], spec: RoutingSpec) -> Any:
    """Return a sample's ids, [tokens - 1, MoE layers, K], as `spec.id_dtype`."""
    ids, tokens = sample.get(_ROWS), sample.get("tokens")
    ids = ids.value if isinstance(ids, Array) else ids
    if not isinstance(ids, np.ndarray) or not isinstance(tokens, list) or {*map(type, tokens)} != {int}:
        raise ValueError(f"{where} has no {_ROWS} or no tokens; made with --use-rollout-routing-replay?")
    expected = (len(tokens) - 1, spec.num_layers, spec.top_k)
    if ids.shape != expected:
        raise ValueError(
            f"{where}: {_ROWS} {ids.shape}, expected {expected}: a row per token but the last, all decoder layers; is --model "
            "the rollout's?"
        )
    rows = ids[:, list(spec.moe_layers)]
    if rows.size and not 0 <= (least := int(rows.min())) <= (most := int(rows.max())) < spec.num_experts:
        raise ValueError(
            f"{where}: ids {least}..{most}, expected 0..{spec.num_experts - 1}; is --model the rollout's?"
        )
    return rows.astype(spec.id_dtype)


def _version(sample: dict[str, Any]) -> int:
    # -1 unless all turns had the same weights: a dump does not tell versions row by row.
    versions = {str(_only(str | int, version)) for version in sample.get("weight_versions") or ()}
    only = versions.pop() if len(versions) == 1 else ""
    return int(only) if only.isdecimal() else -1
