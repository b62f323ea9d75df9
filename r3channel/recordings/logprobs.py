"""Log-probs of a recorded step: a safetensors file of each trainer rank that computes them, whole or not there.

u64 bytes of JSON, JSON {"engine": {"dtype": "F32", "shape": [n], "data_offsets": [begin, end]}, ...}, the numbers. Two columns
say where each number belongs: `sample`, its place in the ticket, and `position`, the model input whose output it is. A number
is the log-prob of the token after that input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from r3channel.errors import RecordingInvalid
from r3channel.wire.routing import Ids

PLACES = ("sample", "position")
SIDES = ("engine", "trainer", "natural")
"""The columns; `natural` is the trainer's with replay off, in few steps or in none."""
_DTYPES = {**dict.fromkeys(PLACES, ("I32", "<i4")), **dict.fromkeys(SIDES, ("F32", "<f4"))}
_MOST_JSON = 1 << 16


def logprobs_glob(step: int) -> str:
    return f"step-{step:06d}.logprobs-*.safetensors"


def write_logprobs(folder: Path, step: int, rank: int, columns: Mapping[str, Ids]) -> Path | None:
    """Write one rank's log-probs, if the folder has the step.

    A folder without a segment of the step belongs to another node, or to a recording that is over.

    Returns:
        The file, or None if nothing was written.

    Raises:
        OSError: the file cannot be written.
    """
    if not (folder / f"step-{step:06d}.r3s").exists():
        return None
    head, at = dict[str, object](), 0
    arrays = {name: np.ascontiguousarray(column, _DTYPES[name][1]) for name, column in columns.items()}
    for name, array in arrays.items():
        end = at + array.nbytes
        head[name] = {"dtype": _DTYPES[name][0], "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path = folder / logprobs_glob(step).replace("*", str(rank))
    scratch = path.with_name(f".{path.name}")
    columns_bytes = (array.tobytes() for array in arrays.values())
    scratch.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *columns_bytes]))
    return scratch.rename(path)


def read_logprobs(folder: Path, step: int) -> dict[str, Ids]:
    """Read all ranks' columns, one rank after another.

    Returns:
        column -> numbers; empty if no rank wrote any.

    Raises:
        RecordingInvalid: a file is damaged.
    """
    ranks = [_read(path) for path in sorted(folder.glob(logprobs_glob(step)))]
    shared = [name for name in _DTYPES if all(name in columns for columns in ranks)]
    return {name: np.concatenate([columns[name] for columns in ranks]) for name in shared if ranks}


def _read(path: Path) -> dict[str, Ids]:
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        if not 8 <= size + 8 <= min(len(data), _MOST_JSON):
            raise ValueError(f"{size} bytes of JSON in a file of {len(data)}")
        body, head = memoryview(data)[8 + size :], json.loads(data[8 : 8 + size])
        columns = {name: _view(body, name, head[name]) for name in _DTYPES if name in head}
        if not {*PLACES, "trainer"} <= columns.keys() or len({array.shape for array in columns.values()}) > 1:
            raise ValueError(f"columns { ({name: array.shape for name, array in columns.items()}) }")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RecordingInvalid(f"{path}: expected a safetensors file of log-probs: {error!r}") from error
    return columns


def _view(body: memoryview, name: str, entry: Mapping[str, object]) -> Ids:
    begin, end = entry["data_offsets"]  # type: ignore[misc]
    if entry["dtype"] != _DTYPES[name][0] or not 0 <= begin <= end <= len(body):
        raise ValueError(f"{name} of {entry['dtype']} at {begin}..{end} of {len(body)} bytes")
    return np.frombuffer(body[begin:end], _DTYPES[name][1]).reshape(entry["shape"])  # type: ignore[call-overload]
